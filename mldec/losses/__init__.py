"""Losses: map logits [B, K] and targets [B, K] to a scalar, computed in float32.

The constructor of a loss has keyword arguments only. It raises ValueError if an argument is out of
range. A loss has these attributes:

- `reduction` is "sum" or "mean" over the batch. The learner rescales the loss accordingly, so that
  the gradient of a batch does not depend on the number of ranks and micro-batches.
- `exclusive` is True for single-label losses and False for multi-label losses. The default None
  allows both.
- `soft` is True if targets between 0 and 1 are allowed (`mix.labels=weighted`, `mix.smoothing`).
  The default is False.
- `logit_adjustment` [K] is added to the logits by the loss. None disables it.
  `train.start_at_frequency` subtracts it from the initial biases.
- `progress` is the finished fraction of the run, in [0, 1). The learner sets it before each step.
  A loss must not use any other state of the run, because only the step is restored on resume.
- `per_image` is True if the loss keeps a state per training image in its `state_dict`. `forward`
  then has a third argument, the dataset indices [B]. The default is False.
- `lr_factor` is the learning rate of the parameters of the loss, if any, relative to `optim.lr`.
- `start_epoch(epoch, epochs, predict)`, if defined, is called before the first step of each epoch.

Training passes a function that counts the training labels as `label_counts`, the labels of all
training images, int8 [N, K], as `train_labels`, and a function that sums a tensor over all ranks as
`all_reduce`, if the constructor has these arguments. `eps` and similar constants have the values of
the official code.
"""

from mldec import lazily
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel

# Losses are imported on first use, because a run has only one.
__getattr__ = lazily(
    __name__,
    {
        "PartialAsymmetricLoss": "partial",
        "BinaryCrossEntropy": "cross_entropy",
        "CrossEntropy": "cross_entropy",
        "DistributionBalancedLoss": "from_timm",
        "TwoWayLoss": "two_way",
        "ZLPR": "from_timm",
        "AssumeNegative": "missing",
        "EntropyMaximization": "missing",
        "GeneralizedRobustLoss": "missing",
        "HillLoss": "missing",
        "LargeLoss": "missing",
        "SPLC": "missing",
        "PermanentCorrection": "single_positive",
        "PseudoNegatives": "single_positive",
        "ROLE": "single_positive",
    },
)

__all__ = [
    "ROLE",
    "SPLC",
    "ZLPR",
    "AssumeNegative",
    "AsymmetricLoss",
    "AsymmetricLossSingleLabel",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "DistributionBalancedLoss",
    "EntropyMaximization",
    "GeneralizedRobustLoss",
    "HillLoss",
    "LargeLoss",
    "PartialAsymmetricLoss",
    "PermanentCorrection",
    "PseudoNegatives",
    "TwoWayLoss",
]
