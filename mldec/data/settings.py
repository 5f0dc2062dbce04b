"""Names that plugins import from here; each is defined where its subject is."""

from mldec.data.observed import Observed as Observed
from mldec.data.source import FileSettings as FileSettings
from mldec.data.source import Source as Source
from mldec.data.source import assemble as assemble
from mldec.data.tasks import VectorSettings as VectorSettings
