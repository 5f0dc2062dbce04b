#!/usr/bin/env bash
# Unpack the official ImageNet archives of the working directory, and sort the validation images.
set -euo pipefail
mkdir train val
tar -xf ILSVRC2012_img_train.tar -C train
for tar in train/*.tar; do mkdir "${tar%.tar}" && tar -xf "$tar" -C "${tar%.tar}" && rm "$tar"; done
tar -xf ILSVRC2012_img_val.tar -C val
tar -xzf ILSVRC2012_devkit_t12.tar.gz
python - <<'END'
import os
from scipy.io import loadmat
devkit = "ILSVRC2012_devkit_t12/data"
synsets = loadmat(f"{devkit}/meta.mat", squeeze_me=True)["synsets"]
wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
for number, line in enumerate(open(f"{devkit}/ILSVRC2012_validation_ground_truth.txt"), 1):
    image = f"ILSVRC2012_val_{number:08}.JPEG"
    os.renames(f"val/{image}", f"val/{wnids[int(line)]}/{image}")
END
