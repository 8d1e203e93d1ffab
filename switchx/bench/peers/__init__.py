# SPDX-License-Identifier: Apache-2.0
"""Other projects' implementations, which `switchx bench` measures beside ours."""
