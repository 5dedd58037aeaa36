"""For tests of models and training code: several ranks without a launcher, each a thread of one process.

from wherry.testing import run_ranks

def body(comm):
    engine, *_ = wherry.initialize(model=make_model(), mesh=comm, config=config)
    ...

results = run_ranks(4, body)
"""

from wherry.testing.ranks import ThreadComm, run_grid, run_ranks

__all__ = ["ThreadComm", "run_grid", "run_ranks"]
