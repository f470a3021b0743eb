"""What a ViT looks at: attention, tokens, positions, patch filters and costs, from the fused path.

A model and images go in; figures and an HTML page come out. `recording` sees attention as it is called, so no model
needs code of its own.

Begin with `report`, which makes the figures; the modules that it calls compute their data.
"""

from .costs import Cost, cost_table, image_cost
from .gradients import Contribution, contributions
from .layer import AttentionLayer
from .maps import attention_distance, class_relevance, entropy, gradient_rollout, rollout
from .page import Absent, Panel, write_report
from .queries import QueryView, query_panels, query_views
from .recording import Recording, capture
from .report import explain, explain_run, published_tables
from .tokens import (
    Geometry,
    feature_colours,
    filter_components,
    geometry,
    patch_filters,
    position_similarity,
    position_table,
    principal_components,
    rotary_bands,
    stage_geometry,
    token_similarity,
)

__all__ = [
    "Absent",
    "AttentionLayer",
    "Contribution",
    "Cost",
    "Geometry",
    "Panel",
    "QueryView",
    "Recording",
    "attention_distance",
    "capture",
    "class_relevance",
    "contributions",
    "cost_table",
    "entropy",
    "explain",
    "explain_run",
    "feature_colours",
    "filter_components",
    "geometry",
    "gradient_rollout",
    "image_cost",
    "patch_filters",
    "position_similarity",
    "position_table",
    "principal_components",
    "published_tables",
    "query_panels",
    "query_views",
    "rollout",
    "rotary_bands",
    "stage_geometry",
    "token_similarity",
    "write_report",
]
