"""`python -m d2plm`, so that `torchrun -m d2plm train` works."""

import sys

from d2plm.cli import main

sys.exit(main())
