# SPDX-License-Identifier: Apache-2.0
"""`python -m switchx`: the same as the `switchx` command."""

import sys

from switchx.own_code import leave_out_working_directory

leave_out_working_directory()

from switchx.cli.main import main  # noqa: E402, no module of the working directory before it

sys.exit(main())
