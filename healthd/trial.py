"""Where `python -m healthd.trial` begins: a daemon that runs over newer files tries its site checks so too."""

from healthd.settings.registry import load_site
from healthd.settings.trial import main

if __name__ == "__main__":
    main(load_site)
