"""Losses: map logits [B, K] and targets [B, K] to a scalar, computed in float32.

All losses inherit from `Loss`, which defines and describes their attributes. The constructor of a
loss has keyword arguments only, and raises ValueError if an argument is out of range. Losses do not
log, and do not read or write files.

Training passes a function that counts the training labels as `label_counts`, the labels of all
training images, int8 [N, K], as `train_labels`, and a function that sums a tensor over all ranks as
`all_reduce`, if the constructor has these arguments. `eps` and similar constants have the values of
the official code.
"""

from mldec import lazily
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel
from mldec.losses.base import Loss

# Losses are imported on first use, because a run has only one.
_MODULES = {
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
}
__getattr__ = lazily(__name__, _MODULES)
__all__ = ["AsymmetricLoss", "AsymmetricLossSingleLabel", "Loss", *_MODULES]
