# SPDX-License-Identifier: Apache-2.0
"""What holds or does not: numbers that switchx promises, each against its bound.

`make promises` measures all of them. A promise is a function that yields rows of a name, what
was measured and a value; `promises.py` is the table of all, with their bounds. Nothing here is
a time.
"""
