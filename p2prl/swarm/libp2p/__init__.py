"""The network over hivemind's p2pd and DHT; the only room that imports hivemind, and that without its trainers."""

from p2prl.swarm.libp2p.lean import import_hivemind

import_hivemind()
