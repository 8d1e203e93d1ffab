# SPDX-License-Identifier: Apache-2.0
"""From a trained run to a folder ready to be served: the six steps of SE-MoE's deployment."""
