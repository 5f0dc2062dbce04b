"""Published sizes of the datasets: how many images and classes they have."""

# Images of train and val, and classes, by the name of the data option. Source: the datasets' own
# pages, and the counts that the readers of published code arrive at; where two counts are in use,
# DATASETS.md says what makes the difference.
OFFICIAL = {
    "coco": ({82_081, 82_783, 117_266, 118_287}, {40_137, 40_504, 4_952, 5_000}, {80}),
    "coco_zsl": (set(), set(), {48, 65}),
    "voc2007": ({5_011}, {4_952}, {20}),
    "voc2012": ({5_717, 11_540}, {5_823}, {20}),
    "openimages_miil": ({9_011_219}, {125_436}, {9_605}),
    "openimages": ({9_011_219}, {41_620, 125_436}, {9_605}),
    "nuswide81": ({119_103, 161_789}, {50_720, 107_859}, {81}),
    "nuswide_zsl": (set(), set(), {925, 1_006}),
    "nuswide_official": ({161_789}, {107_859}, {925, 1_006}),
    "imagenet": ({1_281_167}, {50_000}, {1_000}),
    "cars": ({8_144}, {8_041}, {196}),
    "cifar100": ({50_000}, {10_000}, {100}),
    "vg500": ({82_904}, {10_000}, {500}),
}
