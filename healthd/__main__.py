"""python -m healthd"""

import sys

from healthd.cli import main

sys.exit(main())
