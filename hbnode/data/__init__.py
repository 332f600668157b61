"""Irregular series from tables to padded batches."""

from hbnode.data.batches import BucketedBatches, Dataset, bucketed_batches, collate
from hbnode.data.long_tables import from_long
from hbnode.data.series import Series

__all__ = ["BucketedBatches", "Dataset", "Series", "bucketed_batches", "collate", "from_long"]
