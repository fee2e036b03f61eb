from opgraft.core import loader
from tests import probes

if (
    loader.in_use() is not None
):  # else there is no compiler either, and nothing to be tested with it
    probes.load()
