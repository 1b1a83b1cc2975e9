"""python -m healthd"""

import sys

from healthd.cli.main import main

sys.exit(main())
