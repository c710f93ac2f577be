// RMSNorm, with a residual added before it or not, with codes after it or not: see norm.py.
#include "row_op.cuh"

namespace cutegemm {
namespace {

void check_norm(const char* op, const Tensor& x, const OptionalTensor& weight) {
  check_floats(op, "x", x);
  if (!weight) return;
  const int64_t hidden = x.sizes().back();
  CG_CHECK(scalar_type(*weight) == ScalarType::Float || scalar_type(*weight) == scalar_type(x), op, ": weight is ",
           text(scalar_type(*weight)), "; it must be torch.float32 or the dtype of x, ", text(scalar_type(x)));
  CG_CHECK(shape_of(*weight) == std::vector<int64_t>{hidden}, op, ": weight is ", text(weight->sizes()),
           "; it must be [", hidden, "], as a row of x");
  check_device(op, "weight", *weight, x);
}

// residual: is added. sum: takes x + residual. normed: takes the norm. codes: take it quantized.
void run(const char* op, const Tensor& x, const Tensor* residual, const Output* sum, const OptionalTensor& weight,
         double eps, double weight_offset, const Output* normed, const Quantization& to) {
  const DeviceOf device(x);
  const Input source(x), other(residual ? *residual : x);
  const Tensor by = !weight || weight->is_contiguous() ? weight.value_or(x) : torch::stable::contiguous(*weight);
  const Norm norm = {by.data_ptr(),
                     weight ? kernel_dtype(scalar_type(by)) : int32_t(CUTEGEMM_NONE),
                     reinterpret_cast<uintptr_t>(by.data_ptr()) % 16 == 0,
                     float(weight_offset),
                     float(eps),
                     1.f / float(source.rows.size)};
  with_float_type(x, [&](auto* element) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    const RowsOf<T> out = normed ? normed->of<T>() : RowsOf<T>{};
    const auto with = [&](const auto& from) {
      run_rows<true, T>(op, from, source.rows.count, source.rows.size, norm, out, to, device.stream);
    };
    if (residual) {
      with(Sum<T>{source.of<T>(), other.of<T>(), sum->of<T>()});
    } else {
      with(Plain<T>{source.of<T>()});
    }
  });
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset) {
  check_norm("rms_norm", x, weight);
  const Output out(empty(x.sizes(), scalar_type(x), x));
  run("rms_norm", x, nullptr, nullptr, weight, eps, weight_offset, &out, {});
  return out.tensor;
}

void rms_norm_out(const Tensor& out, const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset) {
  check_norm("rms_norm", x, weight);
  check_like("rms_norm", "out", out, x, shape_of(x));
  check_apart("rms_norm", "out", out, "x", x, true);
  check_apart("rms_norm", "out", out, "weight", weight);
  const Output to("rms_norm", "out", out);
  run("rms_norm", x, nullptr, nullptr, weight, eps, weight_offset, &to, {});
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                              double eps, double weight_offset) {
  constexpr auto* op = "fused_add_rms_norm";
  check_norm(op, x, weight);
  check_like(op, "residual", residual, x, shape_of(x));
  const Output normed(empty(x.sizes(), scalar_type(x), x)), sum(empty(x.sizes(), scalar_type(x), x));
  run(op, x, &residual, &sum, weight, eps, weight_offset, &normed, {});
  return {normed.tensor, sum.tensor};
}

void fused_add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps,
                         double weight_offset) {
  constexpr auto* op = "fused_add_rms_norm_";
  check_norm(op, x, weight);
  check_like(op, "residual", residual, x, shape_of(x));
  check_apart(op, "x", x, "residual", residual);
  check_apart(op, "x", x, "weight", weight);
  check_apart(op, "residual", residual, "weight", weight);
  const Output normed(op, "x", x), sum(op, "residual", residual);
  run(op, x, &residual, &sum, weight, eps, weight_offset, &normed, {});
}

// The three quantized forms. residual: is added, and the sum goes to sum.
std::tuple<Tensor, Tensor> quantized(const char* op, const Tensor& x, const Tensor* residual, const Output* sum,
                                     const OptionalTensor& weight, double eps, double weight_offset,
                                     const OptionalDtype& dtype, const OptionalTensor& scale,
                                     const std::string& granularity, int64_t group_size, const OptionalTensor& scale_ub,
                                     bool column_major_scale, bool power_of_two_scale, const OptionalTensor& normed) {
  const FusedCodes codes({op, scalar_type(dtype, ScalarType::Float8_e4m3fn), scale, granularity, group_size, scale_ub,
                          column_major_scale, power_of_two_scale},
                         x, x.sizes().back(), "normed", normed);
  run(op, x, residual, sum, weight, eps, weight_offset, codes.out(), codes.to());
  return codes.result();
}

void check_quantized(const char* op, const Tensor& x, const Tensor* residual, const OptionalTensor& weight,
                     const OptionalTensor& scale, const OptionalTensor& scale_ub, const OptionalTensor& normed) {
  check_norm(op, x, weight);
  if (residual) check_like(op, "residual", *residual, x, shape_of(x));
  if (!normed) return;
  check_like(op, "normed", *normed, x, shape_of(x));
  check_apart(op, "normed", *normed, "x", x, true);
  if (residual) check_apart(op, "normed", *normed, "residual", *residual);
  check_apart(op, "normed", *normed, "weight", weight);
  check_apart(op, "normed", *normed, "scale", scale);
  check_apart(op, "normed", *normed, "scale_ub", scale_ub);
}

std::tuple<Tensor, Tensor> rms_norm_quant(const Tensor& x, const OptionalTensor& weight, double eps,
                                          double weight_offset, const OptionalDtype& dtype, const OptionalTensor& scale,
                                          const std::string& granularity, int64_t group_size,
                                          const OptionalTensor& scale_ub, bool column_major_scale,
                                          bool power_of_two_scale, const OptionalTensor& normed) {
  constexpr auto* op = "rms_norm_quant";
  check_quantized(op, x, nullptr, weight, scale, scale_ub, normed);
  return quantized(op, x, nullptr, nullptr, weight, eps, weight_offset, dtype, scale, granularity, group_size, scale_ub,
                   column_major_scale, power_of_two_scale, normed);
}

std::tuple<Tensor, Tensor, Tensor> fused_add_rms_norm_quant(
    const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps, double weight_offset,
    const OptionalDtype& dtype, const OptionalTensor& scale, const std::string& granularity, int64_t group_size,
    const OptionalTensor& scale_ub, bool column_major_scale, bool power_of_two_scale, const OptionalTensor& normed) {
  constexpr auto* op = "fused_add_rms_norm_quant";
  check_quantized(op, x, &residual, weight, scale, scale_ub, normed);
  const Output sum(empty(x.sizes(), scalar_type(x), x));
  const auto [q, returned] = quantized(op, x, &residual, &sum, weight, eps, weight_offset, dtype, scale, granularity,
                                       group_size, scale_ub, column_major_scale, power_of_two_scale, normed);
  return {q, returned, sum.tensor};
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_quant_(const Tensor& x, const Tensor& residual,
                                                     const OptionalTensor& weight, double eps, double weight_offset,
                                                     const OptionalDtype& dtype, const OptionalTensor& scale,
                                                     const std::string& granularity, int64_t group_size,
                                                     const OptionalTensor& scale_ub, bool column_major_scale,
                                                     bool power_of_two_scale, const OptionalTensor& normed) {
  constexpr auto* op = "fused_add_rms_norm_quant_";
  check_quantized(op, x, &residual, weight, scale, scale_ub, normed);
  check_apart(op, "residual", residual, "x", x);
  check_apart(op, "residual", residual, "weight", weight);
  check_apart(op, "residual", residual, "scale", scale);
  check_apart(op, "residual", residual, "scale_ub", scale_ub);
  const Output sum(op, "residual", residual);
  return quantized(op, x, &residual, &sum, weight, eps, weight_offset, dtype, scale, granularity, group_size, scale_ub,
                   column_major_scale, power_of_two_scale, normed);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_out", TORCH_BOX(&rms_norm_out));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("fused_add_rms_norm_", TORCH_BOX(&fused_add_rms_norm_));
  m.impl("rms_norm_quant", TORCH_BOX(&rms_norm_quant));
  m.impl("fused_add_rms_norm_quant", TORCH_BOX(&fused_add_rms_norm_quant));
  m.impl("fused_add_rms_norm_quant_", TORCH_BOX(&fused_add_rms_norm_quant_));
}

}  // namespace cutegemm
