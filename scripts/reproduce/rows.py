"""Results of the papers, and the settings that train them: one row per model.

A model in several tables has one run with one name, so that it is trained once. The note of a row
names the source of values that are not from a table: a plot (read to about 0.05), a model zoo or an
abstract.
"""

from dataclasses import dataclass, field

from cost_table import POINTS, Point

# The authors' weights trained on Open Images. The official train.py starts TResNet-L from the first
# file. The second is their only released file of TResNet-M.
START_L = "init=zoo:tresnet_l_pretrain"
START_M = "init=zoo:tresnet_m_openimages_224"
ZSL = ["+experiment=nuswide_zsl_tresnet_m", "backbone=tresnet_l"]
NOISE = "train.query_noise=0.1"
RANDOM = "train.random_queries=1"
READ_OFF = "read off the plot"
CROP = "test crop: that of procedure A2"


@dataclass(frozen=True)
class Row:
    """A model of a paper, and the settings that train it."""

    run: str  # name of the run; unique for these settings
    label: str
    settings: list[str]
    paper: dict[str, float] = field(default_factory=dict)  # published values by metric
    note: str = ""  # source of the values, if not a table of the paper
    choice: str = ""  # parts of the recipe that are not published
    runs: bool = True  # False if the paper could not run it either


COCO_M = Row(
    "coco_tresnet_m",
    "TResNet-M, ML-Decoder, K = 80",
    ["+experiment=coco_tresnet_m", START_M],
    {"mAP": 88.1},
    choice="start: the paper's is not named",
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
    return Row(run, label, COCO_M.settings + settings, {"mAP": value}, note, COCO_M.choice)


def coco_s(run: str, label: str, settings: list[str], value: float) -> Row:
    """Return a TResNet-S of figure 5."""
    own = ["+experiment=coco_tresnet_m", "backbone=tresnet_s"] + settings
    choice = "starts from random weights: none were released"
    return Row(run, label, own, {"mAP": value}, READ_OFF, choice)


def openimages(run: str, label: str, settings: list[str], value: float) -> Row:
    """Return a row of table 2, whose recipe is not published."""
    own = ["+experiment=openimages_tresnet_m"] + settings
    note = "9,605 classes here, 9,600 in the paper"
    return Row(run, label, own, {"mAP_partial": value}, note, "recipe: none is published")


def zero_shot(run: str, label: str, settings: list[str], value: float) -> Row:
    """Return a row of table 3: the official command, with query augmentations."""
    choice = "start: the paper's is not confirmed"
    if settings:
        choice += "; sampling of the augmentations"
    own = ZSL + [START_L] + settings
    return Row(run, label, own, {"zsl_mAP": value}, choice=choice)


def imagenet(point: Point) -> Row:
    """Return a point of figure 6, trained with A2."""
    backbone = point.backbone.replace("-", "").lower()
    experiment = f"imagenet_{backbone}_a2"
    settings = ["+experiment=imagenet_resnet50_a2", f"backbone={backbone}_scratch"]
    paper = {"top1": point.paper_top1}

    if point.head == "gap":
        settings.append("head=gap")
        return Row(f"{experiment}_gap", f"{point.backbone}, GAP", settings, paper, READ_OFF, CROP)
    label = f"{point.backbone}, ML-Decoder, K = 100"
    return Row(experiment, label, settings, paper, READ_OFF, CROP)


def query2label(
    run: str,
    label: str,
    values: list[float],
    choice: str,
    settings: list[str] | None = None,
) -> Row:
    """Return a model of the Query2Label paper.

    `values` are the first of `Q2L_METRICS`. `settings` default to the experiment `run`.
    """
    own = settings or [f"+experiment={run}"]
    paper = dict(zip(Q2L_METRICS, values, strict=False))
    note = "" if values else "the figure was not found"
    return Row(run, label, own, paper, note, choice)


def recipe(
    run: str,
    label: str,
    paper: dict[str, float] | None = None,
    note: str = "a published figure was not found",
    settings: list[str] | None = None,
) -> Row:
    """Return a network that is not in these papers, with a value published elsewhere."""
    own = settings or [f"+experiment={run}"]
    return Row(run, label, own, paper or {}, note, "recipe: see the header of its experiment")


Q2L = "+experiment=q2l_coco_resnet101_448"
Q2L_METRICS = ("mAP_interpolated", "CF1", "OF1", "CF1@3", "OF1@3")
ADDS = "ADDS (arXiv 2208.09562), another decoder on the same encoders"
ADDS_NUSWIDE = f"{ADDS} with ViT-L/14 336; RAM (arXiv 2503.15337) has 53.2, by an index of results"
TABLE_6 = {
    "zsl_mAP": 31.1,
    "gzsl_mAP": 19.9,
    "zsl_F1@3": 34.1,
    "gzsl_F1@3": 23.3,
    "zsl_F1@5": 30.8,
    "gzsl_F1@5": 26.1,
}
FIGURE_6 = {row.run: row for row in map(imagenet, POINTS)}
CUTOUT = "cutout: none, as the released code runs it"
TRESNET_Q2L = "widths, batch norms over all GPUs: from third-party scripts; " + CUTOUT
BATCH = "batch; " + CUTOUT
OURS = "recipe: that of MS-COCO, none is published"
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
                note="infeasible in the paper: no value",
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
                ["+experiment=coco_tresnet_l", "backbone=resnet101"],
                {"mAP": 87.1},
                choice="start: ImageNet-1K; the paper's, trained on Open Images, was not released",
            ),
            COCO_L,
            Row(
                "coco_tresnet_l_640",
                "TResNet-L 640, ML-Decoder",
                ["+experiment=coco_tresnet_l", "data.image_size=640", START_L],
                {"mAP": 91.1},
                "abstract, WACV",
            ),
            Row(
                "coco_tresnet_xl_640",
                "TResNet-XL 640, ML-Decoder",
                ["+experiment=coco_tresnet_l", "backbone=tresnet_xl", "data.image_size=640"],
                {"mAP": 91.4},
                "abstract, arXiv",
                "starts from random weights: none were released",
            ),
            Row(
                "coco_tresnet_m_224",
                "TResNet-M 224, ML-Decoder",
                ["+experiment=coco_tresnet_m", "data.image_size=224", START_M],
                {"mAP": 84.2},
                "model zoo",
                COCO_M.choice,
            ),
        ],
    ),
    "table6": (
        "NUS-WIDE, zero-shot and generalized zero-shot",
        [
            Row(
                "nuswide_zsl_both",
                "ML-Decoder",
                ZSL + [START_L, NOISE, RANDOM],
                TABLE_6,
                choice="start: the paper's is not confirmed; sampling of the augmentations",
            ),
            Row(
                "nuswide_zsl_tresnet_m",
                "ML-Decoder, TResNet-M",
                ["+experiment=nuswide_zsl_tresnet_m", NOISE, RANDOM],
                TABLE_6,
                "the network of table 6 is not confirmed; known runs of its code reach 18.9",
                "as the row above; starts from ImageNet-21K",
            ),
        ],
    ),
    "figure5": (
        "MS-COCO 448: mAP against GFLOPs",
        [
            coco_s("coco_tresnet_s_gap", "TResNet-S, GAP", ["head=gap"], 86.8),
            coco_s("coco_tresnet_s", "TResNet-S, ML-Decoder", [], 87.7),
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
                "text of v2",
                "start, epochs and gammas: not named",
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
                "abstract",
                "that A1 is its recipe is derived",
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
                "official README",
                "recipe: none is published",
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
                "official README",
                "recipe: none is published",
            )
        ],
    ),
    "query2label": (
        "Query2Label",
        [
            query2label(
                "q2l_coco_resnet101_448",
                "MS-COCO, ResNet-101 448",
                [84.9, 79.3, 81.5, 73.3, 75.4],
                CUTOUT,
            ),
            query2label(
                "q2l_coco_resnet101_448_encoder_layers_decoder_layers",
                "MS-COCO, ResNet-101 448, 1 decoder layer, no encoder",
                [],
                CUTOUT,
                [Q2L, "head.encoder_layers=0", "head.decoder_layers=1"],
            ),
            query2label(
                "q2l_coco_resnet101_448_self_attention",
                "MS-COCO, ResNet-101 448, self-attention of the queries",
                [],
                CUTOUT,
                [Q2L, "head.self_attention=true"],
            ),
            query2label(
                "q2l_coco_resnet101_576",
                "MS-COCO, ResNet-101 576",
                [86.5, 81.0, 82.8, 76.5, 78.3],
                BATCH,
                [Q2L, "data.image_size=576", "train.batch_size=64"],
            ),
            query2label(
                "q2l_coco_tresnet_l_448",
                "MS-COCO, TResNet-L 448",
                [87.3, 81.6, 83.1, 77.0, 78.5],
                TRESNET_Q2L,
            ),
            query2label(
                "q2l_coco_tresnet_l_22k_448",
                "MS-COCO, TResNet-L 22k 448",
                [89.2, 83.8, 84.9, 79.0, 80.2],
                TRESNET_Q2L,
                [
                    "+experiment=q2l_coco_tresnet_l_448",
                    "backbone.name=tresnet_v2_l.miil_in21k",
                    "head.embed_dim=2048",
                    "head.mlp_dim=8192",
                ],
            ),
            query2label(
                "q2l_coco_swin_l_384",
                "MS-COCO, Swin-L 384",
                [90.5, 85.4, 86.4, 80.5, 81.2],
                BATCH,
            ),
            query2label(
                "q2l_coco_cvt_w24_384",
                "MS-COCO, CvT-w24 384",
                [91.3, 85.9, 86.8, 80.8, 81.6],
                BATCH,
            ),
            query2label("q2l_voc2007_tresnet_l_448", "VOC 2007, TResNet-L 448", [], OURS),
            query2label(
                "q2l_voc2012_tresnet_l_448",
                "VOC 2012, TResNet-L 448",
                [96.2],
                OURS,
                ["+experiment=q2l_voc2007_tresnet_l_448", "data=voc2012"],
            ),
            query2label(
                "q2l_nuswide81_resnet101_448",
                "NUS-WIDE, ResNet-101 448",
                [65.0],
                OURS,
                ["+experiment=q2l_coco_resnet101_448", "data=nuswide81"],
            ),
            query2label(
                "q2l_nuswide81_tresnet_l_448",
                "NUS-WIDE, TResNet-L 448",
                [66.3],
                OURS,
                ["+experiment=q2l_coco_tresnet_l_448", "data=nuswide81"],
            ),
            query2label("q2l_vg500_resnet101_576", "Visual Genome 500, ResNet-101 576", [], OURS),
        ],
    ),
    "recipes": (
        "Later networks: our recipes",
        [
            recipe("coco_dinov3_l_frozen", "MS-COCO, frozen DINOv3 ViT-L/16 448"),
            recipe("coco_dinov3_b", "MS-COCO, DINOv3 ViT-B/16 448"),
            recipe(
                "coco_dinov2_b",
                "MS-COCO, DINOv2 ViT-B/14 448",
                settings=[
                    "+experiment=coco_dinov3_b",
                    "backbone.name=vit_base_patch14_reg4_dinov2.lvd142m",
                ],
            ),
            recipe("coco_clip_l_336", "MS-COCO, CLIP ViT-L/14 336, words", {"mAP": 91.76}, ADDS),
            recipe(
                "coco_clip_l_644",
                "MS-COCO, CLIP ViT-L/14 644, words",
                {"mAP": 93.41},
                f"{ADDS} at 640",
                ["+experiment=coco_clip_l_336", "data.image_size=644"],
            ),
            recipe(
                "nuswide_zsl_clip_b16",
                "NUS-WIDE zero-shot, CLIP ViT-B/16",
                {"zsl_mAP": 39.01},
                ADDS_NUSWIDE,
            ),
            recipe(
                "nuswide_zsl_siglip2_b16",
                "NUS-WIDE zero-shot, SigLIP 2 ViT-B/16",
                {"zsl_mAP": 39.01},
                ADDS_NUSWIDE,
                [
                    "+experiment=nuswide_zsl_clip_b16",
                    "data.vectors=clip:ViT-B-16-SigLIP2:webli",
                    "backbone.name=vit_base_patch16_siglip_gap_224.v2_webli",
                    "head.word_dim=768",
                ],
            ),
        ],
    ),
    "asl": (
        "ASL, MS-COCO",
        [
            Row(
                "asl_coco_tresnet_m_224",
                "TResNet-M 224, GAP",
                ["+experiment=asl_coco_tresnet_l_448", "backbone=tresnet_m", "data.image_size=224"],
                {"mAP": 81.8},
                "model zoo of ASL",
            ),
            Row(
                "asl_coco_resnet101_448",
                "ResNet-101 448, GAP",
                ["+experiment=asl_coco_tresnet_l_448", "backbone=resnet101"],
                {"mAP": 85.0},
                choice="start: not named",
            ),
            Row(
                "asl_coco_tresnet_l_1k_448",
                "TResNet-L 448, GAP, from ImageNet-1K",
                [
                    "+experiment=asl_coco_tresnet_l_448",
                    "backbone=timm",
                    "backbone.name=tresnet_l.miil_in1k",
                ],
                {"mAP": 86.6},
            ),
            Row(
                "asl_coco_tresnet_l_448",
                "TResNet-L 448, GAP, from ImageNet-21K",
                ["+experiment=asl_coco_tresnet_l_448"],
                {"mAP": 88.4},
                choice="start: which network and file is not named",
            ),
            Row(
                "asl_coco_tresnet_xl_640",
                "TResNet-XL 640, GAP",
                [
                    "+experiment=asl_coco_tresnet_l_448",
                    "backbone=timm",
                    "backbone.name=tresnet_xl.miil_in1k",
                    "data.image_size=640",
                ],
                {"mAP": 88.4},
                "model zoo of ASL",
            ),
        ],
    ),
}
