"""The results of the paper, and the settings that train them here: one row per model.

The same model may be in several tables: its run has one name, so that it is trained once. The note
of a value that is not in a table of the paper says where it is from: read off a plot (to about
0.05), a model zoo, an abstract.
"""

from dataclasses import dataclass, field

from mldec.benchmark.paper import Point, points

# Start weights of the official train.py: the authors' file, trained on Open Images. TResNet-M
# starts from ImageNet-21K.
START_L = "init=zoo:tresnet_l_pretrain"
TRESNET_S = ["+experiment=coco_tresnet_m", "backbone=tresnet_s"]
ZSL = "+experiment=nuswide_zsl_tresnet_m"
NOISE, RANDOM = "train.query_noise=0.1", "train.random_queries=1"
READ_OFF = "read off the plot"
FROM_RANDOM = "training starts from random weights: no others are published"


@dataclass(frozen=True)
class Row:
    """A model of the paper, and how it is trained here."""

    run: str  # name of the run; unique for these settings
    label: str
    settings: list[str]  # that train it
    paper: dict[str, float] = field(default_factory=dict)  # the paper's value per metric
    note: str = ""  # on the value or on how sure the recipe is
    runs: bool = True  # false: the paper could not run it either


COCO_M = Row(
    "coco_tresnet_m", "TResNet-M, ML-Decoder, K = 80", ["+experiment=coco_tresnet_m"], {"mAP": 88.1}
)
COCO_L = Row(
    "coco_tresnet_l",
    "TResNet-L 448, ML-Decoder",
    ["+experiment=coco_tresnet_l", START_L],
    {"mAP": 90.0},
    "zoo: 90.1",
)


def coco_m(run: str, label: str, settings: list[str], value: float, note: str = "") -> Row:
    """Return a TResNet-M of table 1 or figure 5."""
    return Row(run, label, ["+experiment=coco_tresnet_m", *settings], {"mAP": value}, note)


def openimages(run: str, label: str, settings: list[str], value: float) -> Row:
    """Return a row of table 2; its recipe is not published."""
    note = "recipe not published; 9,605 classes here, 9,600 in the paper"
    return Row(
        run, label, ["+experiment=openimages_tresnet_m", *settings], {"mAP_partial": value}, note
    )


def zero_shot(run: str, label: str, settings: list[str], value: float) -> Row:
    """Return a row of table 3."""
    note = "network and start not confirmed"
    if settings:
        note += "; how the augmentations are drawn is our choice"
    return Row(run, label, [ZSL, *settings], {"zsl_mAP": value}, note)


def imagenet(point: Point) -> Row:
    """Return a point of figure 6, trained with A2."""
    experiment = f"imagenet_{point.network.replace('-', '').lower()}_a2"
    settings = [f"+experiment={experiment}"]
    paper = {"top1": point.top1}

    if point.head == "gap":
        return Row(
            f"{experiment}_gap", f"{point.network}, GAP", [*settings, "head=gap"], paper, READ_OFF
        )
    return Row(experiment, f"{point.network}, ML-Decoder, K = 100", settings, paper, READ_OFF)


TABLE_6 = {
    "zsl_mAP": 31.1,
    "gzsl_mAP": 19.9,
    "zsl_F1@3": 34.1,
    "gzsl_F1@3": 23.3,
    "zsl_F1@5": 30.8,
    "gzsl_F1@5": 26.1,
}
FIGURE_6 = {row.run: row for row in map(imagenet, points())}
OPENIMAGES_200 = openimages("openimages_tresnet_m", "ML-Decoder, K = 200", [], 86.8)

TABLES: dict[str, tuple[str, list[Row]]] = {
    "table1": (
        "MS-COCO, TResNet-M 448: heads",
        [
            coco_m("coco_tresnet_m_gap", "GAP", ["head=gap"], 87.0),
            coco_m(
                "coco_tresnet_m_transformer",
                "Transformer-Decoder",
                ["head=transformer_decoder"],
                88.1,
            ),
            coco_m("coco_tresnet_m_k20", "ML-Decoder, K = 20", ["head.num_groups=20"], 88.0),
            COCO_M,
        ],
    ),
    "table2": (
        "Open Images, TResNet-M 224: heads",
        [
            openimages("openimages_tresnet_m_gap", "GAP", ["head=gap"], 86.0),
            Row(
                "openimages_tresnet_m_transformer",
                "Transformer-Decoder, 9,605 queries",
                ["+experiment=openimages_tresnet_m", "head=transformer_decoder"],
                note="infeasible in the paper: no value, and not run here",
                runs=False,
            ),
            openimages(
                "openimages_tresnet_m_k100", "ML-Decoder, K = 100", ["head.num_groups=100"], 86.7
            ),
            OPENIMAGES_200,
            openimages(
                "openimages_tresnet_m_k400", "ML-Decoder, K = 400", ["head.num_groups=400"], 86.8
            ),
        ],
    ),
    "table3": (
        "NUS-WIDE zero-shot: query augmentations",
        [
            zero_shot("nuswide_zsl_plain", "none", [], 29.9),
            zero_shot("nuswide_zsl_noise", "additive noise", [NOISE], 30.6),
            zero_shot("nuswide_zsl_random", "random query", [RANDOM], 30.7),
            zero_shot("nuswide_zsl_both", "both", [NOISE, RANDOM], 31.1),
        ],
    ),
    "table5": (
        "MS-COCO: the state of the art",
        [
            Row(
                "coco_resnet101",
                "ResNet101 448, ML-Decoder",
                ["+experiment=coco_resnet101"],
                {"mAP": 87.1},
                "paper: Open Images pretraining, not released; others get 81.1 from ImageNet-1K",
            ),
            COCO_L,
            Row(
                "coco_tresnet_l_640",
                "TResNet-L 640, ML-Decoder",
                ["+experiment=coco_tresnet_l_640", START_L],
                {"mAP": 91.1},
                "abstract, WACV",
            ),
            Row(
                "coco_tresnet_xl_640",
                "TResNet-XL 640, ML-Decoder",
                ["+experiment=coco_tresnet_xl_640"],
                {"mAP": 91.4},
                f"abstract, arXiv; {FROM_RANDOM}",
            ),
            Row(
                "coco_tresnet_m_224",
                "TResNet-M 224, ML-Decoder",
                ["+experiment=coco_tresnet_m_224"],
                {"mAP": 84.2},
                "model zoo",
            ),
        ],
    ),
    "table6": (
        "NUS-WIDE, zero-shot and generalised zero-shot",
        [
            Row(
                "nuswide_zsl_both",
                "ML-Decoder",
                [ZSL, NOISE, RANDOM],
                TABLE_6,
                "network and start not confirmed; how the augmentations are drawn is our choice",
            ),
            Row(
                "nuswide_zsl_tresnet_l",
                "ML-Decoder, TResNet-L",
                ["+experiment=nuswide_zsl_tresnet_l", NOISE, RANDOM],
                TABLE_6,
                "as the row above; the official command has TResNet-L too, "
                "from Open Images weights",
            ),
        ],
    ),
    "figure5": (
        "MS-COCO 448: mAP against GFLOPs",
        [
            Row(
                "coco_tresnet_s_gap",
                "TResNet-S, GAP",
                [*TRESNET_S, "head=gap"],
                {"mAP": 86.8},
                f"{READ_OFF}; {FROM_RANDOM}",
            ),
            Row(
                "coco_tresnet_s",
                "TResNet-S, ML-Decoder",
                TRESNET_S,
                {"mAP": 87.7},
                f"{READ_OFF}; {FROM_RANDOM}",
            ),
            coco_m(
                "coco_tresnet_m_gap",
                "TResNet-M, GAP",
                ["head=gap"],
                87.3,
                f"{READ_OFF}; table 1 has 87.0",
            ),
            COCO_M,
            Row(
                "coco_tresnet_l_gap",
                "TResNet-L, GAP",
                ["+experiment=coco_tresnet_l", START_L, "head=gap"],
                {"mAP": 89.4},
                READ_OFF,
            ),
            COCO_L,
        ],
    ),
    "figure6": (
        "ImageNet, A2: top-1 of ResNets",
        list(FIGURE_6.values()),
    ),
    "voc": (
        "Pascal VOC 2007",
        [
            Row(
                "voc2007_tresnet_l",
                "TResNet-L, ML-Decoder",
                ["+experiment=voc2007_tresnet_l", "init=zoo:tresnet_l_coco_448"],
                {"mAP": 96.6},
                "text of v2; pretraining not named",
            )
        ],
    ),
    "openimages": ("Open Images", [OPENIMAGES_200]),
    "imagenet": (
        "ImageNet, ResNet-50",
        [
            Row(
                "imagenet_resnet50_a1",
                "ML-Decoder, A1, 600 epochs",
                ["+experiment=imagenet_resnet50_a1"],
                {"top1": 80.7},
                "abstract; that A1 is its recipe is derived",
            ),
            FIGURE_6["imagenet_resnet50_a2"],
        ],
    ),
    "cars": (
        "Stanford-Cars",
        [
            Row(
                "cars_tresnet_l",
                "TResNet-L 384, ML-Decoder",
                ["+experiment=cars_tresnet_l"],
                {"top1": 96.41},
                "official README; recipe not published",
            )
        ],
    ),
    "cifar": (
        "CIFAR-100",
        [
            Row(
                "cifar100_swin_l",
                "Swin-L, ML-Decoder",
                ["+experiment=cifar100_swin_l"],
                {"top1": 95.1},
                "official README; recipe not published",
            )
        ],
    ),
}
# The section of DATASETS.md by the folder that the data option reads.
SECTIONS = {
    "coco": "MS-COCO 2014",
    "openimages_miil": "Open Images V6",
    "nus_wide": "NUS-WIDE",
    "voc": "Pascal VOC 2007 and 2012",
    "imagenet": "ImageNet-1k",
    "stanford_cars": "Stanford-Cars",
    "cifar100": "CIFAR-100",
}
