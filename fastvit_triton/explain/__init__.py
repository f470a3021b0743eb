"""What a ViT looks at: attention, tokens, positions, patch filters and costs, from the fused path.

A model and images go in; figures and an HTML page come out. `recording` sees attention as it is called, so no model
needs code of its own.

Begin with `report`, which makes the figures; the modules that it calls compute their data.
"""

import types as _types

from .costs import Cost as Cost
from .costs import cost_table as cost_table
from .costs import image_cost as image_cost
from .gradients import Contribution as Contribution
from .gradients import contributions as contributions
from .layer import AttentionLayer as AttentionLayer
from .maps import attention_distance as attention_distance
from .maps import class_relevance as class_relevance
from .maps import entropy as entropy
from .maps import gradient_rollout as gradient_rollout
from .maps import rollout as rollout
from .page import Absent as Absent
from .page import Panel as Panel
from .page import write_report as write_report
from .queries import QueryView as QueryView
from .queries import query_panels as query_panels
from .queries import query_views as query_views
from .recording import Recording as Recording
from .recording import capture as capture
from .report import explain as explain
from .report import explain_run as explain_run
from .report import published_tables as published_tables
from .tokens import Geometry as Geometry
from .tokens import feature_colours as feature_colours
from .tokens import filter_components as filter_components
from .tokens import geometry as geometry
from .tokens import patch_filters as patch_filters
from .tokens import position_similarity as position_similarity
from .tokens import position_table as position_table
from .tokens import principal_components as principal_components
from .tokens import rotary_bands as rotary_bands
from .tokens import stage_geometry as stage_geometry
from .tokens import token_similarity as token_similarity

# The imports are the list of public names; modules that they bring are no part of it.
__all__ = sorted(n for n, value in globals().items() if n[0] != "_" and not isinstance(value, _types.ModuleType))
