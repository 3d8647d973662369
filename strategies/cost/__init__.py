"""What a step costs: time and link bytes of every strategy, from a hardware spec and the shapes of a base model."""

from strategies.cost.attention_work import KvLoad, attention_work, decoding
from strategies.cost.calibrated import CalibratedModel
from strategies.cost.columns import ATTENTION_COLUMNS, LORA_COLUMNS
from strategies.cost.cost_model import CostModel, StepSize
from strategies.cost.features import AdapterFeatures, adapter_features
from strategies.cost.fit import Fit, Measurement, fit_coefficients
from strategies.cost.ideal import IdealModel
from strategies.cost.link_bytes import attention_link_bytes, lora_link_bytes, lora_moved_bytes
from strategies.cost.model_dims import shape_of_dims
from strategies.cost.paper import PaperModel, matrix_times, weight_read_floor
from strategies.cost.quantities import attention_quantities, lane_quantities, predicted_s
from strategies.cost.shapes import Matrix, ModelShape, PhaseShape, transformer
from strategies.cost.step import MODES, cost_model, plan_problem

__all__ = [
    "ATTENTION_COLUMNS",
    "LORA_COLUMNS",
    "MODES",
    "AdapterFeatures",
    "CalibratedModel",
    "CostModel",
    "Fit",
    "IdealModel",
    "KvLoad",
    "Matrix",
    "Measurement",
    "ModelShape",
    "PaperModel",
    "PhaseShape",
    "StepSize",
    "adapter_features",
    "attention_link_bytes",
    "attention_quantities",
    "attention_work",
    "cost_model",
    "decoding",
    "fit_coefficients",
    "lane_quantities",
    "lora_link_bytes",
    "lora_moved_bytes",
    "matrix_times",
    "plan_problem",
    "predicted_s",
    "shape_of_dims",
    "transformer",
    "weight_read_floor",
]
