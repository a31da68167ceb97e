"""moefold inside transformers: `moefold.transformers.enable()` registers experts and attention as "moefold".

plugin.py is the only file that imports transformers; the others are functions of torch.
"""

from moefold.transformers.plugin import disable as disable
from moefold.transformers.plugin import enable as enable
