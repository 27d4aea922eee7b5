"""Data sets of whole episodes, as files of Minari: reading and writing them."""

from troupe.common.datasets.reading import Dataset
from troupe.common.datasets.trajectory import Trajectory

__all__ = ["Dataset", "Trajectory"]
