"""For tests of models and training code: several ranks without a launcher, each a thread of one process.

from wherry.testing import run_ranks

def body(comm):
    engine, *_ = wherry.initialize(model=make_model(), mesh=comm, config=config)
    ...

results = run_ranks(4, body)

`comm.traffic` counts collectives and their bytes; `small_sizes(bucket=1)` gives tiny models the paths of large ones.
"""

from wherry.testing.ranks import ThreadComm, run_grid, run_ranks
from wherry.testing.sizes import small_sizes

__all__ = ["ThreadComm", "run_grid", "run_ranks", "small_sizes"]
