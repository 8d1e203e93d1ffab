# SPDX-License-Identifier: Apache-2.0
from typing import Literal

# Policies of `cache.make_policy`; named here, so that command-line options need no NumPy.
PolicyName = Literal["lru", "decayed_lfu", "next_use"]
