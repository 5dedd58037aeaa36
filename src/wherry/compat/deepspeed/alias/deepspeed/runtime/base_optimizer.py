from wherry.update.optimizer import ShardedOptimizer as DeepSpeedOptimizer
from wherry.update.optimizer import ShardedOptimizer as ZeROOptimizer
