"""What the real processor makes of a record: the truth that computed costs are checked against.

The only module through which measuring reaches torch and transformers, and only when it is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from packtrain.core.errors import ConfigError, RecordError, in_one_line
from packtrain.core.modality import GRIDS, PIXELS
from packtrain.core.values import Media, MediaKind, Record, Text
from packtrain.delivery.encode.decode import decode_frames, decode_image
from packtrain.delivery.encode.pixels import (
    frame_indices,
    load_processor,
    put_video_kwargs,
    sampling_settings,
    video_metadata,
)
from packtrain.families.chat_template import ChatTemplate, with_date
from packtrain.families.dialect import Dialect, dialect_of, template_variables
from packtrain.families.family import ProcessorSettings
from packtrain.families.part_limits import MediaRules
from packtrain.families.registry import find_family, load_rule
from packtrain.measuring.drift import ProcessorCounts
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore


def load_reference(request: Request) -> RealProcessor | str:
    """The real processor for a request, or a note why it cannot be asked."""
    settings = request.settings()
    family = find_family(settings.model_type)
    if family is not None and not family.in_transformers:
        return "skipped: this family's processor is packtrain's rule"
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        return f"skipped: {error.name} is not installed (pip install 'packtrain[train]')"
    return RealProcessor(request, settings)


def _load_config(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}/config.json",
            got=in_one_line(error),
            expected="the config of a model that transformers can load",
            fix="check the folder with AutoConfig.from_pretrained, or pass --check 0",
        ) from error


_ANY_SIZE = {"shortest_edge": 1, "longest_edge": 10**12}
ProcessorOutputs = dict[str, Any]  # names and tensors, as the model takes them; `input_ids` as a flat list


class RealProcessor:
    """A Hugging Face processor or tokenizer, called as training calls it."""

    def __init__(self, request: Request, settings: ProcessorSettings) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.folder = settings.folder
        self._multimodal = bool(settings.image or settings.video or settings.processor)
        self._processor: Any = load_processor(settings, multimodal=self._multimodal, fix=", or pass --check 0")
        self._tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)
        has_config = (Path(settings.folder) / "config.json").exists()
        self._config: Any = _load_config(settings.folder) if has_config else None
        family = load_rule(settings, request.limits)
        if family is None and request.limits.given():
            raise ConfigError(
                "processor_config",
                got=", ".join(request.limits.given()) + f" for {settings.model_type}, whose costs come from its "
                "processor",
                expected="no limits: they apply to families with a rule only",
                fix="write them into the model folder's processor settings",
            )
        self._parts = MediaRules(settings, family) if family is not None else None
        self._kwargs: Mapping[str, Any] = family.processor_kwargs() if family is not None else {}
        self._eos = self._tokenizer.eos_token if request.add_eos else None
        self._plain_eos = None if request.add_eos is False else self._tokenizer.eos_token
        if settings.own_template:
            self._processor.chat_template = self._tokenizer.chat_template = settings.chat_template
        # A processor ignores a template that only its tokenizer has.
        has_own = getattr(self._processor, "chat_template", None) is not None and not settings.own_template
        self._own_template = None if has_own else settings.chat_template
        if settings.template_date is not None and settings.chat_template is not None:
            self._own_template = with_date(settings.chat_template, settings.template_date)
        self._other_for_videos = has_own and family is not None and family.video_chat_template is not None
        self._dialect = self._make_dialect(settings.chat_template, settings)
        self._tool_dialect = self._make_dialect(settings.tool_template, settings)
        self._tool_template = settings.tool_template
        if settings.template_date is not None and settings.tool_template is not None:
            self._tool_template = with_date(settings.tool_template, settings.template_date)

    def _make_dialect(self, source: str | None, settings: ProcessorSettings) -> Dialect:
        if source is None:
            return Dialect("none")
        template = ChatTemplate(source, settings.special_tokens, settings.template_date)
        return dialect_of(template, string_content=not self._multimodal)

    # ---- encoding

    def encode(self, record: Record, store: MediaStore) -> ProcessorCounts:
        """Ids and pixels of one record, counted."""
        return self.count(record, self.outputs(record, store))

    def count(self, record: Record, outputs: ProcessorOutputs) -> ProcessorCounts:
        """What the processor returned for a record, counted."""
        ids = outputs["input_ids"]
        patches, largest = self._patches(outputs)
        image, video = self.token_ids("image"), self.token_ids("video")
        media = image | video
        return ProcessorCounts(
            ids=ids,
            media_tokens=sum(i in media for i in ids) if media else None,
            video_tokens=sum(i in video - image for i in ids),
            patches=patches,
            max_patches_per_image=largest,
            frames=outputs.get("sampled_frames", 0),
            tail_tokens=_tail(ids, media, any(True for _ in record.media())),
        )

    def outputs(self, record: Record, store: MediaStore) -> ProcessorOutputs:
        """Everything the processor returns, `input_ids` as a flat list."""
        if record.tokens is not None:
            return {"input_ids": list(record.tokens.ids)}
        if record.plain or self._template() is None:
            if any(True for _ in record.media()):
                raise RecordError("template", "the model has no chat template", "which says where media go")
            text = "".join(p.text for m in record.messages for p in m.parts if isinstance(p, Text))
            ids = self._tokenizer(text)["input_ids"]
            return {"input_ids": self._append_eos(ids, text, self._plain_eos)}
        variables = template_variables(record.variables)
        if not self._multimodal:
            for_tools = "tools" in variables and self._tool_template is not None
            dialect = self._tool_dialect if for_tools else self._dialect
            messages = [dialect.written(m, "".join(_texts(m.parts))) for m in record.messages]
            template = self._tool_template if for_tools and self._own_template is not None else self._own_template
            outputs = self._tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, **variables
            )
            ids = outputs["input_ids"]
            return {"input_ids": self._append_eos(ids, self._render(messages, variables), self._eos)}
        kwargs = {key: dict(value) if isinstance(value, Mapping) else value for key, value in self._kwargs.items()}
        messages, metadata = self._with_media(record, store)
        for kind in _kinds_with_limits(record):  # what has bounds of its own is as large as it is to be
            kwargs[f"{kind}s_kwargs"] = {**kwargs.get(f"{kind}s_kwargs", {}), "size": _ANY_SIZE}
        if metadata:
            put_video_kwargs(kwargs, do_sample_frames=False, video_metadata=[metadata], return_metadata=True)
        outputs = self._processor.apply_chat_template(
            messages,
            chat_template=None if metadata and self._other_for_videos else self._own_template,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=kwargs,
            **variables,
        )
        fields = dict(outputs)
        fields["input_ids"] = self._append_eos(
            fields["input_ids"][0].tolist(), self._render(messages, variables), self._eos
        )
        fields["sampled_frames"] = sum(len(about.frames_indices) for about in metadata)
        return fields

    def _with_media(self, record: Record, store: MediaStore) -> tuple[list[dict[str, Any]], list[Any]]:
        messages, metadata, bounded = [], [], _kinds_with_limits(record)
        for message in record.messages:
            content: list[dict[str, Any]] = []
            for part in message.parts:
                if isinstance(part, Text):
                    content.append({"type": "text", "text": part.text})
                elif part.kind == "image":
                    image: Any = decode_image(store, part.ref)
                    if size := self._require_limits(part).resized("image", part.limits) if part.limits else None:
                        image = image.resize(size[::-1])
                    if "image" in bounded:
                        image = Image.new("RGB", self._size(part, "image", image))
                    content.append({"type": "image", "image": image})
                else:
                    frames, about = self._frames(part, store)
                    if "video" in bounded:
                        width, height = self._size(part, "video", frames, video_metadata=[[about]])
                        frames = np.zeros((len(frames), height, width, 3), np.uint8)
                    content.append({"type": "video", "video": frames})
                    metadata.append(about)
            messages.append(self._dialect.written(message, content))
        return messages, metadata

    def _frames(self, part: Media, store: MediaStore) -> tuple[Any, Any]:
        """The frames that the processor itself chooses, decoded by us."""
        header = store.header(part.kind, part.ref)
        kwargs = (
            self._require_limits(part).rule_for("video", part.limits).processor_kwargs()
            if part.limits
            else self._kwargs
        )
        indices = frame_indices(self._processor, sampling_settings(self._processor, kwargs), header)
        return decode_frames(store, part.ref, indices), video_metadata(header, indices)

    def _require_limits(self, part: Media) -> MediaRules:
        if self._parts is None:
            raise RecordError("family", "a limit in a part", "they apply to families with a rule only")
        return self._parts

    def _size(self, part: Media, kind: MediaKind, pixels: Any, **more: Any) -> tuple[int, int]:
        """Width and height to which the processor itself brings one medium under its own limits."""
        kwargs = self._require_limits(part).rule_for(kind, part.limits).processor_kwargs().get(f"{kind}s_kwargs", {})
        kwargs = {name: value for name, value in kwargs.items() if name == "size"}
        processor = getattr(self._processor, f"{kind}_processor")
        if kind == "video":
            more["do_sample_frames"] = False
        outputs = processor([[pixels]], return_tensors="pt", **kwargs, **more)
        _, height, width = outputs[f"{kind}_grid_thw"][0].tolist()
        return width * processor.patch_size, height * processor.patch_size

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        if not self._eos:
            return ""
        return str(self._processor.apply_chat_template(messages, tokenize=False, **variables))

    def _append_eos(self, ids: list[int], text: str, eos: str | None) -> list[int]:
        """Append the end token unless it is there already."""
        if eos is None or text.rstrip().endswith(eos) or ids[-1:] == [self._tokenizer.eos_token_id]:
            return list(ids)
        return [*ids, self._tokenizer.eos_token_id]

    def _template(self) -> Any:
        return getattr(self._processor, "chat_template", None) or getattr(self._tokenizer, "chat_template", None)

    # ---- counting

    def token_ids(self, kind: str) -> set[int]:
        """Ids that are replaced by embeddings of one kind, as the model's own config names them, or its processor."""
        names = (f"{kind}_token_id", f"{kind}_token_index")
        ids = {int(i) for name in names if (i := getattr(self._config, name, None)) is not None}
        own = getattr(self._processor, names[0], None)
        return ids or ({int(own)} if isinstance(own, int) else set())

    def _patches(self, outputs: Mapping[str, Any]) -> tuple[int, int]:
        """Rows of patch embeddings that the vision encoder gets, and the most that attend to each other."""
        total = largest = 0
        for name in GRIDS:
            if name in outputs:
                total += int(outputs[name].prod(-1).sum())
                largest = max(largest, int(outputs[name][:, 1:].prod(-1).max()))
        if total:
            return total, largest
        for name in (name for name in PIXELS if name in outputs):
            pixels = outputs[name]
            if pixels.ndim < 4:  # rows of patches: (patches, width), or (images, patches, width)
                rows = pixels.flatten(0, -2).any(-1)
                total, largest = (
                    total + int(rows.sum()),
                    max(largest, pixels.shape[-2] if pixels.ndim > 2 else len(pixels)),
                )
                continue
            tiles = pixels.flatten(0, -4)  # (tiles, channels, height, width)
            tiles = tiles[tiles.flatten(1).any(1)]  # all-zero tiles only pad a sample with several images
            side = self._patch_side()
            if side:
                largest = (tiles.shape[-2] // side) * (tiles.shape[-1] // side)
                total += len(tiles) * largest
        return total, largest

    def _patch_side(self) -> int:
        """The side of a patch; 0 for an unlisted model that does not say it, whose patches are then not counted."""
        vision = getattr(self._config, "vision_config", None)
        side = getattr(vision, "patch_size", None) or getattr(self._processor, "patch_size", None)
        if side is None and self._parts is None:
            return 0
        if side is None:
            raise ConfigError(
                "patches", got="no patch size in the model's config", fix="put the model's config.json into its folder"
            )
        return int(side[0]) if isinstance(side, (list, tuple)) else int(side)


def _kinds_with_limits(record: Record) -> set[MediaKind]:
    """Kinds of media of which some have bounds of their own: one call of a processor has the same for all."""
    return {
        m.kind
        for m in record.media()
        if m.limits is not None and {"min_pixels", "max_pixels"} & m.limits.given().keys()
    }


def _tail(ids: Sequence[int], media: set[int], expected: bool) -> int | None:
    """Number of ids after the last media token; None if one is expected and there is none."""
    everything = None if expected else len(ids)
    return next((count for count, i in enumerate(reversed(ids)) if i in media), everything)


def _texts(parts: tuple[Text | Media, ...]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Text)]
