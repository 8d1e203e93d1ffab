# SPDX-License-Identifier: Apache-2.0
"""`python -m switchx`: the same as the `switchx` command."""

import sys

from switchx.cli.main import main

sys.exit(main())
