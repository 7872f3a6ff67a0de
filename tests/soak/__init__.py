"""``make soak``: 1,000 updates of a real server, with requests in flight and a fault every few.

``python -m tests.soak --updates 1000 --seed 0 --device cpu`` runs against the SGLang of its own
environment; ``--device cuda`` does the same with a model of four layers of the size of an 8B one,
under CUDA graphs. Four clients ask without pause. What is in flight at an update is aborted,
finished or retracted by turns. About every third update comes after a fault (``faults.py``).

After each step:

- ``judge.py``: every token that a client was given carries a version that was committed, and its
  logprob is that of this version's policy on the same prefix, by a model of transformers that has
  the same FP8 weights (``tests/logprob_oracle.py``). What a policy gives for the tokens of the one
  before is printed beside it, as a control.
- after a fault the engine is as it was, or quarantined, as the fault demands; the next complete
  update heals it.
- ``resources.py``: memory, descriptors, threads, memory regions and shared segments of engine and
  trainer are sampled; they must not grow.

The first violation ends the run with the seed, the sequence and the server's log. The seed decides
all but the moments at which things meet. ``bridge.py`` alone calls the bridge.
"""
