from wherry.update.loss_scale import LossScaler
from wherry.update.loss_scale import LossScaler as DynamicLossScaler
