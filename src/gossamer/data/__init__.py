"""Text data for training: sources, tokenizers, packing into sequences, and the order of samples.

Everything here is a pure function of its arguments and of files that do not change; there is no thread and no state. A
run resumes at any sample, on any number of ranks, by asking for that sample.
"""

from gossamer.data.corpus import Corpus, open_corpus, open_validation
from gossamer.data.entropy import TextStatistics, statistics
from gossamer.data.ordering import Order, SampleOrder, order
from gossamer.data.packing import IGNORED, Sequences, Split, valid_labels
from gossamer.data.preview import Preview, decode_preview
from gossamer.data.share import global_indices, rows_for, share_rows

__all__ = [
    "Corpus",
    "IGNORED",
    "Order",
    "SampleOrder",
    "Preview",
    "Sequences",
    "Split",
    "TextStatistics",
    "decode_preview",
    "global_indices",
    "open_corpus",
    "open_validation",
    "order",
    "rows_for",
    "share_rows",
    "statistics",
    "valid_labels",
]
