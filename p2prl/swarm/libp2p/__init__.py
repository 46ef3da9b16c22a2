"""The network over hivemind's p2pd and DHT; the only room that imports hivemind (seconds, and torch with it)."""

import os
import warnings

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # hivemind reads it once, when it is imported
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its deprecations are not the user's to repair
    import hivemind as hivemind
