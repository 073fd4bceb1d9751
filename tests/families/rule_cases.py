"""The real processors against which the families' rules are tested: published settings, defaults, and odd ones."""

from __future__ import annotations

from rule_checks import Case, gemma3, idefics3, internvl, llava, llava_next, onevision, qwen, smolvlm

from packtrain.core.values import MediaLimits

LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def all_cases() -> dict[str, Case]:
    """Every case by name."""
    full = {"vision_feature_select_strategy": "full"}
    one = {"num_image_tokens": 729, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    edge = {"longest_edge": 1536}
    tile = {"longest_edge": 512}
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}
    scan = {"images_kwargs": {"do_pan_and_scan": True}}
    scan_small = {"images_kwargs": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64}}
    return {
        "qwen2_vl": Case(family="qwen2_vl", make=qwen("2"), bare=True),
        "qwen2_vl-limits": Case(
            family="qwen2_vl", make=qwen("2"), limits=MediaLimits(min_pixels=50_176, max_pixels=401_408)
        ),
        "qwen2_5_vl": Case(
            family="qwen2_5_vl", make=qwen("2_5", size={"shortest_edge": 3136, "longest_edge": 12_845_056})
        ),
        "qwen2_5_vl-max": Case(family="qwen2_5_vl", make=qwen("2_5"), limits=MediaLimits(max_pixels=100_352)),
        "qwen3_vl": Case(
            family="qwen3_vl", make=qwen("3", patch_size=16, size={"shortest_edge": 65_536, "longest_edge": 16_777_216})
        ),
        "qwen3_vl-bare": Case(family="qwen3_vl", make=qwen("3"), bare=True),
        "qwen2_vl-capped": Case(family="qwen2_vl", make=qwen("2", {"cap_pixels_per_frame": True, "fps": 2.0})),
        "qwen3_vl-capped": Case(family="qwen3_vl", make=qwen("3", {"cap_pixels_per_frame": True})),
        "idefics3": Case(family="idefics3", make=idefics3(), bare=True),
        "idefics3-uneven": Case(
            family="idefics3", make=idefics3(), limits=MediaLimits(max_img_size=1000), processor_values={}
        ),
        "idefics3-huge": Case(family="idefics3", make=idefics3(size={"longest_edge": 5000}), longest=2000),
        "idefics3-whole": Case(family="idefics3", make=idefics3(do_image_splitting=False)),
        "smolvlm": Case(
            family="smolvlm",
            make=smolvlm(64, {"video_sampling": sampling, "max_image_size": tile}, size=edge, max_image_size=tile),
            processor_values={"image_seq_len": 64},
            patch=16,
        ),
        "smolvlm-limit": Case(family="smolvlm", make=smolvlm(), limits=MediaLimits(max_img_size=728)),
        "llava": Case(family="llava", make=llava("CLIPImageProcessor", LLAVA), processor_values=LLAVA, bare=True),
        "llava-padded": Case(
            family="llava",
            make=llava("LlavaImageProcessor", {**LLAVA, **full}, do_pad=True, do_center_crop=False),
            processor_values={**LLAVA, **full},
        ),
        "llava-uncropped": Case(
            family="llava",
            make=llava("CLIPImageProcessor", LLAVA, do_center_crop=False, size={"shortest_edge": 84}),
            processor_values=LLAVA,
        ),
        "llava-siglip": Case(
            family="llava",
            make=llava("SiglipImageProcessor", {"patch_size": 16, **full}, size={"height": 384, "width": 384}),
            processor_values={"patch_size": 16, **full},
            patch=16,
        ),
        "llava_next": Case(
            family="llava_next",
            make=llava_next(LLAVA, size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
            processor_values=LLAVA,
        ),
        "llava_next-bare": Case(family="llava_next", make=llava_next(LLAVA), processor_values=LLAVA, bare=True),
        "llava_onevision": Case(family="llava_onevision", make=onevision(one), processor_values=one, bare=True),
        "llava_onevision-max_4": Case(
            family="llava_onevision",
            make=onevision({**one, "vision_aspect_ratio": "anyres_max_4"}),
            processor_values={**one, "vision_aspect_ratio": "anyres_max_4"},
        ),
        "internvl": Case(
            family="internvl",
            make=internvl(size={"height": 448, "width": 448}, video={"size": {"height": 448, "width": 448}}),
        ),
        "internvl-bare": Case(family="internvl", make=internvl(), bare=True),
        "internvl-6": Case(
            family="internvl",
            make=internvl(64, min_patches=2, max_patches=6),
            processor_values={"image_seq_length": 64},
        ),
        "gemma3": Case(family="gemma3", make=gemma3(size={"height": 896, "width": 896}, do_pan_and_scan=True)),
        "gemma3-bare": Case(family="gemma3", make=gemma3(), bare=True),
        "gemma3-scan": Case(family="gemma3", make=gemma3(), processor_values=scan),
        "gemma3-scan-small": Case(family="gemma3", make=gemma3(), processor_values=scan_small),
    }


IMAGE_CASES = (
    *("qwen2_vl", "qwen2_vl-limits", "qwen2_5_vl", "qwen2_5_vl-max", "qwen3_vl", "qwen3_vl-bare"),
    *("qwen2_vl-capped", "qwen3_vl-capped"),
    *("idefics3", "idefics3-uneven", "idefics3-huge", "idefics3-whole", "smolvlm", "smolvlm-limit"),
    *("llava", "llava-padded", "llava-uncropped", "llava-siglip", "llava_next", "llava_next-bare"),
    *("llava_onevision", "llava_onevision-max_4", "internvl", "internvl-bare", "internvl-6"),
    *("gemma3", "gemma3-bare", "gemma3-scan", "gemma3-scan-small"),
)
