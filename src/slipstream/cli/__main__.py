"""`python -m slipstream.cli`."""

import sys

from slipstream.cli import main

sys.exit(main())
