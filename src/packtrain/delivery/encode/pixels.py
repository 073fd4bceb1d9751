"""Decoded media -> the tensors that the model's vision encoder takes, by the real image and video processors.

The processors are called on the media alone, with the arguments that a whole processor would hand them. Positions of
M-RoPE models are computed by the model itself, from the sizes of these tensors:

restart  (1, tokens)  0 1 2 3 ...
mrope    (4, tokens)  0 1 2 3 ... and below it time, height and width of each token
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packtrain.core.errors import ConfigError, DriftError, RecordError, in_one_line, install_hint
from packtrain.core.values import MediaHeader, MediaKind, PartLimits
from packtrain.delivery.encode.decode import Decoded
from packtrain.families.family import BatchContract, Expansion, ProcessorSettings
from packtrain.families.part_limits import MediaRules

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 256  # sets of limits whose arguments are kept
_NOT_FOR_SAMPLING = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Processor arguments under one set of limits."""

    sampling: Mapping[str, Any] | None
    images: Mapping[str, Any]
    videos: Mapping[str, Any]


class MediaProcessor:
    """The image and video processors of one model, with the arguments of the run's limits and of those in parts."""

    def __init__(self, settings: ProcessorSettings, parts: MediaRules, contract: BatchContract) -> None:
        self._contract = contract
        self._parts = parts
        self._processor = load_processor(settings, multimodal=True)
        self._arguments: dict[tuple[MediaKind, PartLimits | None], _Arguments] = {}

    def _arguments_for(self, header: MediaHeader) -> _Arguments:
        key = header.kind, header.limits
        if key not in self._arguments:
            if len(self._arguments) >= _MOST:
                self._arguments.clear()
            self._arguments[key] = self._make_arguments(self._parts.rule_for(*key).processor_kwargs())
        return self._arguments[key]

    def _make_arguments(self, kwargs: dict[str, Any]) -> _Arguments:
        sampling = sampling_settings(self._processor, kwargs)
        kwargs = copy.deepcopy(kwargs)
        put_video_kwargs(kwargs, do_sample_frames=False, return_metadata=True)
        merged = self._processor._merge_kwargs(
            self._processor.valid_processor_kwargs,
            tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs,
            return_tensors="pt",
            **kwargs,
        )
        # Decoded images are in RGB already; converting would copy each once more.
        images = {**merged["images_kwargs"], "do_convert_rgb": False}
        return _Arguments(sampling, images, merged["videos_kwargs"])

    def frame_indices(self, header: MediaHeader) -> list[int]:
        """The frames of a video that the model is shown."""
        return frame_indices(self._processor, self._arguments_for(header).sampling, header)

    def tensors(
        self, decoded: Sequence[Decoded], expansions: Sequence[Expansion], runs: Sequence[MediaKind]
    ) -> dict[str, Tensor]:
        """The media of one sample; `expansions` in the same order, `runs` the kinds of media tokens in the text."""
        images = [medium for medium in decoded if medium.header.kind == "image"]
        videos = [medium for medium in decoded if medium.header.kind == "video"]
        try:
            tensors = self._images(images) if images else {}
            made_videos = self._videos(videos) if videos else {}
        except MemoryError:
            raise
        except Exception as error:  # a processor may fail in any way on bad media
            raise RecordError("processor", "the processor failed", f"{type(error).__name__}: {error}"[:300]) from None
        if self._contract.text_order:
            tensors = {"pixel_values": _in_text_order(tensors, made_videos, runs)}
        else:
            tensors = {**tensors, **made_videos}
        media = {name: tensors[name] for name in self._contract.media if name in tensors}
        _check_shapes(self._contract, media, decoded, expansions)
        return media

    def _images(self, images: Sequence[Decoded]) -> dict[str, Any]:
        def call(alike: Sequence[Decoded]) -> dict[str, Any]:
            kwargs = self._arguments_for(alike[0].header).images
            return dict(self._processor.image_processor([[medium.pixels for medium in alike]], **kwargs))

        return _call_in_groups(call, images, lambda medium: self._arguments_for(medium.header).images.get("size"))

    def _videos(self, videos: Sequence[Decoded]) -> dict[str, Any]:
        import torch

        def call(alike: Sequence[Decoded]) -> dict[str, Any]:
            metadata = [[video_metadata(video.header, video.indices) for video in alike]]
            frames = [[video.pixels for video in alike]]
            kwargs = self._arguments_for(alike[0].header).videos
            return dict(self._processor.video_processor(frames, video_metadata=metadata, **kwargs))

        tensors = _call_in_groups(call, videos, lambda medium: self._arguments_for(medium.header).videos.get("size"))
        if "second_per_grid_ts" in self._contract.media:
            step = self._processor.video_processor.temporal_patch_size
            tensors["second_per_grid_ts"] = torch.tensor(
                [step / about.sampled_fps for about in tensors["video_metadata"]]
            )
        for name, join in self._contract.media.items():
            if join == "images" and name in tensors:  # (videos, frames, ...), but a video is images of one sample
                tensors[name] = tensors[name].flatten(0, 1).unsqueeze(0)
        return tensors


def _call_in_groups(
    call: Callable[[Sequence[Decoded]], dict[str, Any]], media: Sequence[Decoded], size: Callable[[Decoded], Any]
) -> dict[str, Any]:
    """Call a processor once for each run of consecutive media with the same limits.

    Only families whose tensors have a row for each patch, or each medium, have bounds of single media.
    """
    import torch

    outputs = [call(list(alike)) for _, alike in itertools.groupby(media, size)]
    if len(outputs) == 1:
        return outputs[0]
    return {
        name: torch.cat([one[name] for one in outputs])
        if torch.is_tensor(tensor)
        else [x for one in outputs for x in one[name]]
        for name, tensor in outputs[0].items()
    }


def load_processor(settings: ProcessorSettings, *, multimodal: bool, fix: str = "") -> Any:
    """The folder's processor, or its tokenizer where it has none."""
    try:
        from transformers import AutoProcessor, AutoTokenizer
    except ImportError as error:
        raise ConfigError("encoding", got=str(error), fix="pip install 'packtrain[train]'") from error
    try:
        auto = AutoProcessor if multimodal else AutoTokenizer
        return auto.from_pretrained(settings.folder, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            settings.folder,
            got=in_one_line(error)[:300],
            expected="a processor that transformers can load",
            fix=(install_hint(error) or "check the folder with AutoProcessor.from_pretrained") + fix,
        ) from error


def sampling_settings(processor: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments for the video processor's frame sampling; None where all are taken, or there are no videos."""
    video = getattr(processor, "video_processor", None)
    options = {**kwargs, **kwargs.get("videos_kwargs", {})}
    if video is None or options.get("do_sample_frames") is False:
        return None
    names = [name for name in video.valid_kwargs.__annotations__ if name not in _NOT_FOR_SAMPLING]
    return {name: options.get(name, getattr(video, name, None)) for name in names}


def frame_indices(processor: Any, sampling: Mapping[str, Any] | None, header: MediaHeader) -> list[int]:
    """The frames that the processor itself chooses.

    Some processors count in floats and choose one frame past the last; it is left out.
    """
    if sampling is None:
        return list(range(header.frames))
    indices = processor.video_processor.sample_frames(metadata=video_metadata(header), **sampling)
    return [int(index) for index in indices if index < header.frames]


def video_metadata(header: MediaHeader, indices: Sequence[int] | None = None) -> Any:
    """A video's header as transformers takes it."""
    from transformers.video_utils import VideoMetadata

    about = VideoMetadata(
        total_num_frames=header.frames,
        fps=header.fps,
        duration=header.seconds,
        width=header.width,
        height=header.height,
    )
    if indices is not None:
        about.frames_indices = list(indices)
    return about


def put_video_kwargs(kwargs: dict[str, Any], **values: Any) -> None:
    """Beside the video arguments that are there, flat or nested: a processor refuses the same name in both places."""
    for name, value in values.items():
        if name in kwargs or "videos_kwargs" not in kwargs:
            kwargs[name] = value
        else:
            kwargs["videos_kwargs"][name] = value


def _in_text_order(images: Mapping[str, Any], videos: Mapping[str, Any], runs: Sequence[MediaKind]) -> Tensor:
    """Tiles of images and frames of videos in one tensor, as their tokens follow each other.

    An image is one run of tokens, a video one run for each frame.
    """
    import torch

    tiles = iter(torch.split(images["pixel_values"], [int(n) for n in images["num_patches"]]) if images else ())
    frames = iter(videos["pixel_values_videos"].flatten(0, 1).split(1) if videos else ())
    return torch.cat([next(tiles if kind == "image" else frames) for kind in runs])


def _check_shapes(
    contract: BatchContract, media: Mapping[str, Tensor], decoded: Sequence[Decoded], expansions: Sequence[Expansion]
) -> None:
    """Refuse tensors that do not belong to the tokens: the model would use the wrong pixels for a token."""
    for name, kinds in (("pixel_values", ("image", "video")), ("pixel_values_videos", ("video",))):
        join = contract.media.get(name)
        if join is None:
            continue
        if name == "pixel_values" and "pixel_values_videos" in contract.media:
            kinds = ("image",)
        shown = [
            expansion for medium, expansion in zip(decoded, expansions, strict=True) if medium.header.kind in kinds
        ]
        shape = tuple(media[name].shape) if name in media else ()
        expected = _leading_shape(name, contract, shown)
        if shape[: len(expected)] != expected:
            raise DriftError(
                f"{name} of " + (", ".join(medium.name for medium in decoded) or "a sample"),
                got=f"shape {shape} from the real processor",
                expected=f"{expected} in front, as computed from the sizes of the media",
                fix="the family's rule and the installed transformers disagree: please report it with both versions",
            )


def _leading_shape(name: str, contract: BatchContract, shown: Sequence[Expansion]) -> tuple[int, ...]:
    if not shown:
        return ()
    tiles = [expansion.tiles for expansion in shown]
    if contract.positions == "mrope":
        return (sum(expansion.patches for expansion in shown),)
    if contract.media[name] == "images":
        return (1, sum(tiles))
    if contract.media[name] == "tiles":
        return (len(shown), max(tiles))
    return (len(shown), max(tiles)) if name == "pixel_values_videos" else (sum(tiles),)


_DEPTHS = ("num_hidden_layers", "depth")


class Positions:
    """Positions for one model. Its shell is built when the first sample with media asks for it."""

    def __init__(self, folder: str, contract: BatchContract) -> None:
        self._folder = folder
        self._mrope = contract.positions == "mrope"
        self._shell: Any = None

    def warm_up(self) -> None:
        """Build the shell, where one is needed and not there yet."""
        if self._mrope and self._shell is None:
            self._shell = model_shell(self._folder)

    def of(self, input_ids: Tensor, token_kinds: Tensor, media: Mapping[str, Tensor]) -> Tensor:
        """The rows of positions of one whole sample, or of a first piece of one that holds all its media."""
        import torch

        positions = torch.arange(len(input_ids)).unsqueeze(0)
        if not self._mrope:
            return positions
        if not media:
            return positions.repeat(4, 1)
        self.warm_up()
        given = {**media, "mm_token_type_ids": token_kinds[None], "attention_mask": torch.ones_like(input_ids)[None]}
        taken = inspect.signature(self._shell.get_rope_index).parameters
        arguments = {name: value for name, value in given.items() if name in taken}
        try:
            rows, _ = self._shell.get_rope_index(input_ids[None], **arguments)
        except (RuntimeError, ValueError, IndexError, StopIteration) as error:
            detail = f"{type(error).__name__}: {error}"[:300]
            raise RecordError("positions", "the model cannot place the sample's media", detail) from None
        if len(rows) != 3:
            raise RecordError("positions", "the model has positions of another kind", f"{len(rows)} rows")
        return torch.cat([positions, rows[:, 0]])


def model_shell(folder: str) -> Any:
    """A model without weights and with one layer in each part, for the sake of its methods."""
    try:
        import torch
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ConfigError("encoding", got=str(error), fix="pip install 'packtrain[train]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            folder, got=str(error), expected="a model's config.json", fix="put it next to the processor's files"
        ) from error
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if part is not None:
            _flatten(part)
    with torch.device("meta"):
        return AutoModel.from_config(config).eval()


def _flatten(config: Any) -> None:
    """One layer."""
    for name in _DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    if getattr(config, "deepstack_visual_indexes", None):
        config.deepstack_visual_indexes = [0]
    if getattr(config, "fullatt_block_indexes", None):
        config.fullatt_block_indexes = [0]
