# SPDX-License-Identifier: Apache-2.0
from typing import Literal

# Of `cache.make_policy`; here, where options of a command line may name it without NumPy.
PolicyName = Literal["lru", "decayed_lfu", "next_use"]
