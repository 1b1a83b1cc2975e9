"""`python -m healthd.trial` begins here: a daemon whose files were replaced also tries its site checks with it."""

from healthd.settings.registry import load_site
from healthd.settings.trial import main

if __name__ == "__main__":
    main(load_site)
