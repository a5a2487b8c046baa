"""``python -m deepthin``: the same as the ``deepthin`` command."""

import sys

from deepthin.cli.main import main

sys.exit(main())
