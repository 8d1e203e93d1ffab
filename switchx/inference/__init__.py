# SPDX-License-Identifier: Apache-2.0
"""Trained models at work: decoding, beam search, batch pruning, quantized experts, serving."""
