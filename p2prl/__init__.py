"""Reinforcement-learning post-training of language models by a swarm of volunteers' machines.

The flow, one way round:

    prompt -> rollout -> group of trajectories (version-stamped, signed) -> gossip -> admission -> buffer
      -> learner step -> new version (signed manifest, verified pieces) -> any peer -> engine -> rollout

=============  ====================================  ==========================================================
arrow          owner                                 queue
=============  ====================================  ==========================================================
prompt, draw   node/rollout_loop.py                  at most `max_in_flight` of our groups wait for the learner
gossip, pull   node/receive_loop.py, swarm/gossip    `Wanted`: bounded per maker; bodies on their way
admission      buffer/admission.py                   `ReceiveLoop.arrived`, 1,024 bodies
replay         buffer/replay.py, node/train_loop.py  the store's admitted and untrained groups
step           learner/ (a child process)            one step at a time
new version    node/weights_loop.py, weights/        the newest head only
who leads      node/election_loop.py, swarm/election
=============  ====================================  ==========================================================

simulate/ runs these very loops, fifty nodes at a time, in virtual time.

Rooms import only downwards: cli, bench and simulate, node, web, then rollout, buffer, learner (which don't know each
other), weights, environments, models, objectives, swarm (likewise), then codec, identity, recipe, config and the records.
"""

__version__ = "0.1.0"
