"""FP16 copies of an ONNX graph, proven on the CPU.

To run an FP16 file on a CPU proves nothing: ONNX Runtime computes it in float32 there, and a product of 80,000 that is
infinite on a GPU or a phone stays 80,000. The proof has two parts instead:

- :func:`measure_ranges` runs the float32 graph on real pictures and finds what each operation's numbers reach, also those
  that it computes inside (:data:`INSIDE`): what overflows.
- :func:`rounded` is the FP16 graph with float32 arithmetic and each result rounded to FP16: what its answers lose. Sums
  inside one operation (:data:`SUMS`) are in float32, as GPUs and most phones have them.

An operation of no table is not proven and stays in float32.
"""

import math
from ast import literal_eval
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kd.ship.export.base import INPUT, OUTPUT, Runtime, need

if TYPE_CHECKING:
    import onnx
    import onnxruntime

EXTRA, KEY = "export", "fp16=true"

LARGEST = 65504.0
"""The largest number of FP16."""

NAMED = 8  # layers in a message

DOMAIN = "kd"
PROBE = """
<domain: "kd", opset_import: ["" : {opset}]>
Probe (x) => (largest) {{
    zero = Constant <value_float = 0.0> ()
    infinite = IsInf (x)
    finite = Where (infinite, zero, x)
    magnitudes = Abs (finite)
    largest = ReduceMax <keepdims = 0> (magnitudes)
}}
"""
SQUARES_OF_DEVIATIONS = """
<domain: "kd", opset_import: ["" : {opset}]>
SquaresOfDeviations <axes> (x, y) => (inside) {{
    along = Constant <value_ints : ints = @axes> ()
    mean = ReduceMean (x, along)
    deviation = Sub (x, mean)
    inside = Mul (deviation, deviation)
}}
"""
SQUARES = """
<domain: "kd", opset_import: ["" : {opset}]>
Squares (x, y) => (inside) {{ inside = Mul (x, x) }}
"""
SUM_OF_SQUARES = """
<domain: "kd", opset_import: ["" : {opset}]>
SumOfSquares (x, y) => (inside) {{ inside = Mul (y, y) }}
"""
SUM_OF_POWERS = """
<domain: "kd", opset_import: ["" : {opset}]>
SumOfPowers (x, y) => (inside) {{ inside = Exp (y) }}
"""
CUBES = """
<domain: "kd", opset_import: ["" : {opset}]>
Cubes (x, y) => (inside) {{
    square = Mul (x, x)
    inside = Mul (square, x)
}}
"""
INSIDE = {
    "LayerNormalization": "SquaresOfDeviations",
    "InstanceNormalization": "SquaresOfDeviations",
    "RMSNormalization": "Squares",
    "ReduceL2": "SumOfSquares",
    "ReduceLogSum": "SumOfPowers",
    "ReduceLogSumExp": "SumOfPowers",
    "Gelu": "Cubes",
}
"""By operation, what of its input x and its result y it computes inside: converters take these operations apart (onnxsim,
TensorRT), and there it overflows before any result does. A Gelu has cubes in its approximation by tanh alone."""
SUMS = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm", "GlobalAveragePool",
    "GridSample", "LogSoftmax", "MatMul", "Mean", "ReduceL1", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Resize",
    "Softmax", "Sum",
})  # fmt: skip
"""Operations that sum inside, in float32: products, parts of a mean, powers below 1, or what their result is."""
SINGLE = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Concat", "Constant",
    "ConstantOfShape", "Cos", "DepthToSpace", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike",
    "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max",
    "MaxPool", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "OneHot", "Or", "PRelu", "Pad", "Pow", "Range",
    "Reciprocal", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "Selu",
    "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softplus", "Softsign", "SpaceToDepth", "Split", "Sqrt",
    "Squeeze", "Sub", "Swish", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
    "Xor",
})  # fmt: skip
"""Operations that compute each number from single ones, or move numbers: what they reach is their result."""
ROUND = """
<domain: "kd", opset_import: ["" : {opset}]>
Round (x) => (y) {{
    half = Cast <to = 10> (x)
    y = Cast <to = 1> (half)
}}
"""


@dataclass
class TensorRange:
    """What one tensor of the float32 graph holds on the validation pictures."""

    tensor: str
    """Its name in the graph."""
    layer: str
    """The student's layer that computes it; of a weight the layer that uses it."""
    operation: str
    """The ONNX operation; ``weight``; or ``KIND in OPERATION``, which an operation of :data:`INSIDE` computes inside."""
    largest: float
    """Largest finite magnitude."""
    proven: bool = True
    """Whether what its operation computes inside is known (:func:`is_proven`)."""

    @property
    def unsafe(self) -> bool:
        """Whether its layer stays in float32: FP16 has no number as large, or it is not proven."""
        return self.largest > LARGEST or not self.proven


class HalfPrecision:
    """The FP16 side of one export.

    Attributes:
        ranges: of each tensor, after :meth:`convert`.
        float32_layers: names of the layers that stay in float32, each once, after :meth:`convert`: those whose weights need
            it first, in the order of the graph's weights, then those whose results do, in the order of its operations.
        converted: the FP16 graph, after :meth:`convert`.

    Args:
        pictures: gives the validation pictures in batches of uint8.
    """

    def __init__(self, pictures: Callable[[], Iterable[np.ndarray]]) -> None:
        self.pictures = pictures
        self.ranges: list[TensorRange] = []
        self.float32_layers: list[str] = []
        self.converted: onnx.ModelProto | None = None

    def convert(self, model: "onnx.ModelProto") -> "onnx.ModelProto":
        """The FP16 copy of a float32 graph; fills :attr:`ranges` with what its tensors reach on the pictures.

        Layers whose numbers FP16 can't hold stay in float32. Nodes of ``model`` without a name get one, else it stays as it
        is.
        """
        _name_nodes(model.graph)
        self.ranges = measure_ranges(model, self.pictures())
        unsafe = [tensor for tensor in self.ranges if tensor.unsafe]
        once = dict.fromkeys(tensor.layer for tensor in unsafe)
        self.float32_layers = list(once)
        kept = nodes_around(model.graph, unsafe)
        self.converted = halve(model, kept)
        return self.converted

    def simulation(self) -> Runtime:
        """Runs the graph of :meth:`convert`, called before, on the CPU as a machine with FP16 would: each result rounded."""
        assert self.converted is not None, "a format that halves has converted its graph"
        session = _session(rounded(self.converted))
        return lambda pictures: session.run([OUTPUT], {INPUT: pictures})[0]


def shortened(layers: Sequence[str]) -> str:
    """The first layers by name, and how many more there are."""
    named = ", ".join(layers[:NAMED])
    more = len(layers) - NAMED
    if more > 0:
        return f"{named} and {more} more"
    return named


def measure_ranges(model: "onnx.ModelProto", pictures: Iterable[np.ndarray]) -> list[TensorRange]:
    """What each float32 tensor of a graph holds.

    Of an operation of :data:`INSIDE` what it computes inside is measured too.

    Args:
        model: in float32, with named nodes; it is not changed.
        pictures: batches for its input, uint8.

    Returns:
        Weights first, then the results of the operations in the graph's order.
    """
    import onnx

    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    _add_functions(
        probed, PROBE, SQUARES_OF_DEVIATIONS, SQUARES, SUM_OF_SQUARES, SUM_OF_POWERS, CUBES
    )
    ranges = _add_probes(probed.graph, _types(model))
    _run_probes(probed, ranges, pictures)
    return ranges


def _add_probes(graph: "onnx.GraphProto", types: dict[str, int]) -> list[TensorRange]:
    """Adds to ``graph``, in place, a Probe of each float32 weight that an operation uses, of each float32 result, and of
    what operations compute inside.

    Args:
        graph: of the probed model; Probe ``i`` adds the output ``kd/largest/i``, a scalar.
        types: of its tensors by name.

    Returns:
        The range of each Probe, still without numbers.
    """
    from onnx import TensorProto
    from onnx.helper import make_node, make_tensor_value_info

    ranges: list[TensorRange] = []

    def probe(tensor: str, node: "onnx.NodeProto", operation: str, proven: bool = True) -> None:
        """Adds a probe of a tensor to the graph, whose number becomes its output, and an empty range to ``ranges``."""
        name = f"kd/largest/{len(ranges)}"
        probing = make_node("Probe", [tensor], [name], domain=DOMAIN)
        graph.node.append(probing)
        scalar = make_tensor_value_info(name, TensorProto.FLOAT, [])
        graph.output.append(scalar)
        layer = layer_of(node)
        ranges.append(TensorRange(tensor, layer, operation, 0.0, proven=proven))

    nodes = list(graph.node)
    users = {}
    for node in reversed(nodes):
        users.update(dict.fromkeys(node.input, node))
    for weight in graph.initializer:
        is_float = weight.data_type == TensorProto.FLOAT
        if is_float and weight.name in users and math.prod(weight.dims):
            probe(weight.name, users[weight.name], "weight")
    for node in nodes:
        kind = _kind_inside(node)
        if kind:
            inside = f"{node.output[0]}/inside"
            inputs = [node.input[0], node.output[0]]
            axes = _normalised_axes(node)
            attributes: dict[str, Any] = {"axes": axes} if axes else {}
            graph.node.append(make_node(kind, inputs, [inside], domain=DOMAIN, **attributes))
            probe(inside, node, f"{kind} in {node.op_type}", is_proven(node))
        for tensor in node.output:
            if types.get(tensor) == TensorProto.FLOAT:
                probe(tensor, node, node.op_type, is_proven(node))
    return ranges


def _run_probes(
    probed: "onnx.ModelProto", ranges: list[TensorRange], pictures: Iterable[np.ndarray]
) -> None:
    """Runs a graph of :func:`_add_probes` on batches of pictures, and fills the largest magnitudes of its ``ranges`` in."""
    session = _session(probed)
    probes = [f"kd/largest/{number}" for number in range(len(ranges))]
    for batch in pictures:
        values = session.run(probes, {INPUT: batch})
        for tensor, value in zip(ranges, values, strict=True):
            largest = float(value)
            tensor.largest = max(tensor.largest, largest)


def nodes_around(graph: "onnx.GraphProto", ranges: Collection[TensorRange]) -> set[str]:
    """Names of the nodes that compute or use the tensors of ``ranges``; of what is computed inside a node, that node."""
    tensors = {tensor.tensor for tensor in ranges}
    names = set()
    for node in graph.node:
        inside = [f"{tensor}/inside" for tensor in node.output]
        if tensors.intersection((*node.input, *node.output, *inside)):
            names.add(node.name)
    return names


def halve(model: "onnx.ModelProto", float32_nodes: Collection[str]) -> "onnx.ModelProto":
    """An FP16 copy of a graph, by ONNX Runtime's converter; its input and output keep their types.

    Args:
        model: in float32.
        float32_nodes: names of nodes that stay in float32; between two of them nothing is rounded to FP16.
    """
    float16 = need("onnxruntime.transformers.float16", EXTRA, KEY)
    tools = need("onnxruntime.transformers.onnx_model", EXTRA, KEY)
    converted = float16.convert_float_to_float16(
        model, keep_io_types=True, node_block_list=sorted(float32_nodes)
    )
    half = tools.OnnxModel(converted)
    half.remove_cascaded_cast_nodes()  # the converter casts a float32 result to FP16 and back
    half.topological_sort()  # the converter appends its casts at the end
    del half.model.graph.value_info[:]  # some name the types of before
    return half.model


def rounded(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """A copy of an FP16 graph that computes in float32 and rounds each FP16 result to FP16.

    The rounding is by explicit casts, because ONNX Runtime leaves the results of FP16 operations unrounded on CPUs.
    """
    import onnx
    from onnx.helper import make_node
    from onnx.numpy_helper import from_array, to_array

    float16 = onnx.TensorProto.FLOAT16
    float32 = onnx.TensorProto.FLOAT
    types = _types(model)
    exact = onnx.ModelProto()
    exact.CopyFrom(model)
    _add_functions(exact, ROUND)
    graph = exact.graph
    del graph.value_info[:]

    def widen(tensor: "onnx.TensorProto") -> None:
        """Makes a constant float32 in place, of the same numbers; one of another type stays."""
        if tensor.data_type == float16:
            tensor.CopyFrom(from_array(to_array(tensor).astype(np.float32), tensor.name))

    for weight in graph.initializer:
        widen(weight)
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            widen(attribute.t)
            if attribute.name in ("to", "dtype") and attribute.i == float16:
                attribute.i = float32
        for position, tensor in enumerate(node.output):
            if types.get(tensor) == float16:
                node.output[position] = f"{tensor}/exact"
                nodes.append(make_node("Round", [f"{tensor}/exact"], [tensor], domain=DOMAIN))
    copies = [deepcopy(node) for node in nodes]  # the next line deletes the graph's own nodes
    del graph.node[:]
    graph.node.extend(copies)
    return exact


def _session(model: "onnx.ModelProto") -> "onnxruntime.InferenceSession":
    """A session that runs each operation of a graph as it is, on the CPU: nothing fused."""
    runtime = need("onnxruntime", EXTRA, KEY)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    content = model.SerializeToString()
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _add_functions(model: "onnx.ModelProto", *texts: str) -> None:
    """Adds functions of kd's domain, in ONNX's text form, to a graph in place."""
    from onnx.helper import make_opsetid
    from onnx.parser import parse_function

    versions = {entry.domain: entry.version for entry in model.opset_import}
    model.opset_import.append(make_opsetid(DOMAIN, 1))
    for text in texts:
        model.functions.append(parse_function(text.format(opset=versions[""])))


def _types(model: "onnx.ModelProto") -> dict[str, int]:
    """Element type of each tensor by name, as ONNX numbers them; shapes are inferred."""
    from onnx.shape_inference import infer_shapes

    graph = infer_shapes(model).graph
    return {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }


def _name_nodes(graph: "onnx.GraphProto") -> None:
    """Gives nodes without a name, or with another node's, a name of their own, in place: the converter finds the nodes that
    stay in float32 by name.
    """
    nodes = len(graph.node)
    names: set[str] = set()
    for number, node in enumerate(graph.node):
        is_unique = node.name and node.name not in names
        if not is_unique:
            node.name = f"{node.op_type}_{number}_{nodes}"
        names.add(node.name)


def is_proven(node: "onnx.NodeProto") -> bool:
    """Whether what an operation computes inside is known: it is in one of the tables, not of another library's domain, and a
    LayerNormalization's axes are known (:func:`_normalised_axes`).
    """
    if node.domain:
        return False
    if node.op_type in INSIDE:
        return node.op_type != "LayerNormalization" or bool(_normalised_axes(node))
    return node.op_type in SUMS or node.op_type in SINGLE


def _kind_inside(node: "onnx.NodeProto") -> str:
    """The function of kd's domain that gives what an operation computes inside; "" where it computes nothing there that
    could overflow (also GELU, but by tanh), or is not proven.
    """
    kind = INSIDE.get(node.op_type, "")
    if not is_proven(node):
        return ""
    if node.op_type == "Gelu":
        by_tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
        return kind if by_tanh else ""
    return kind


def _normalised_axes(node: "onnx.NodeProto") -> list[int]:
    """Axes that a normalisation takes mean and variance along, counted from the end (-1); empty for other operations,
    and for a LayerNormalization whose axis is counted from the front, which torch's exporter does not write.
    """
    if node.op_type == "InstanceNormalization":
        return [-1]  # the exporter flattens each group to one axis
    if node.op_type != "LayerNormalization":
        return []
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -1)
    if axis < 0:
        return list(range(axis, 0))
    return []


def layer_of(node: "onnx.NodeProto") -> str:
    """The student's layer that a node belongs to, as torch names it (``blocks.0.attn``).

    The node's name where the graph does not say; of the preprocessing torch's name of the operation.
    """
    metadata = {entry.key: entry.value for entry in node.metadata_props}
    scopes: list[str] = literal_eval(metadata.get("pkg.torch.onnx.name_scopes", "[]"))
    if len(scopes) < 2:
        return node.name
    parent, own_name = scopes[-2:]
    module = parent.removeprefix("model").removeprefix(".")
    return module or own_name
