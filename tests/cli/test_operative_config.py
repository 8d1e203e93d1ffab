# SPDX-License-Identifier: Apache-2.0
"""The operative configuration without the scopes that gin evaluates macros in."""

from switchx.cli.config.files import without_scopes

GIN = """\
from __gin__ import dynamic_registration
from switchx.models import config

# Macros:
# ======
BATCH_SIZE = 16
MODEL = @config.ModelConfig()

# Parameters for MODEL/config.ModelConfig:
# ======
MODEL/config.ModelConfig.activation = 'relu # not a comment'
MODEL/config.ModelConfig.sizes = \\
    [1,
     2]

# Parameters for SOURCE/corpus.Text:
# ======
SOURCE/corpus.Text.path = 'a'
SOURCE/corpus.Text.fraction = 0.05

# Parameters for VOCABULARY/deep/corpus.Text:
# ======
VOCABULARY/deep/corpus.Text.path = 'b'
VOCABULARY/deep/corpus.Text.fraction = 0.05

# Parameters for job.Job:
# ======
job.Job.model = %MODEL
"""


def test_parameters_are_bound_once_unless_their_values_differ():
    assert (
        without_scopes(GIN)
        == """\
from __gin__ import dynamic_registration
from switchx.models import config

BATCH_SIZE = 16
MODEL = @config.ModelConfig()

config.ModelConfig.activation = 'relu # not a comment'
config.ModelConfig.sizes = \\
    [1,
     2]

SOURCE/corpus.Text.path = 'a'
corpus.Text.fraction = 0.05
VOCABULARY/deep/corpus.Text.path = 'b'

job.Job.model = %MODEL
"""
    )


def test_nothing_is_left_to_take_away():
    once = without_scopes(GIN)
    assert without_scopes(once) == once
