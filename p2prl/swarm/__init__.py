"""The swarm: transport, membership, gossip, election, transfer of blobs. Pure decisions plus thin drivers."""
