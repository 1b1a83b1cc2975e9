"""Entry point for `python -m healthd.agent.settings`, which loads the site's checks on trial."""

from healthd.agent.settings.registry import load_site
from healthd.agent.settings.trial import main

if __name__ == "__main__":
    main(load_site)
