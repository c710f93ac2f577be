// Activation functions, of one value or of a pair, with codes after them or not: see activation.py.
#include "row_op.cuh"

namespace cutegemm {
namespace {

enum class Function : int32_t { kSilu, kGelu, kGeluTanh, kRelu2 };
enum class Gate : int32_t { kNone, kFirst, kSecond, kInterleaved };

// x / (1 + 2^power). Of 16 bits the fast exponential and reciprocal are far more exact than the result can be, and what
// they take for zero changes nothing in the sum; of float32 they are not.
template <class T>
__device__ __forceinline__ float logistic(float x, float power) {
  if constexpr (sizeof(T) == 2) {
    float exponential, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(power));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exponential));
    return x * reciprocal;
  }
  return x / (1.f + exp2f(power));
}

constexpr double kLog2OfE = 1.4426950408889634;

// rate: -alpha * log2(e)
template <class T, Function kFunction>
__device__ __forceinline__ float activate(float x, float rate) {
  if constexpr (kFunction == Function::kSilu) return logistic<T>(x, rate * x);
  if constexpr (kFunction == Function::kGelu) return 0.5f * x * erfcf(-0.70710678f * x);
  if constexpr (kFunction == Function::kGeluTanh) {  // (1 + tanh(y)) / 2 is the logistic function of 2 y
    constexpr double kRate = -2 * 0.7978845608028654 * kLog2OfE;
    return logistic<T>(x, x * (float(kRate * 0.044715) * (x * x) + float(kRate)));
  }
  return x > 0.f ? x * x : x * 0.f;  // NaN stays
}

// Into [-limit, limit] or below limit. NaN stays, which fminf would not let it.
__device__ __forceinline__ float at_most(float x, float limit) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(limit));
  return result;
}
__device__ __forceinline__ float at_least(float x, float limit) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(limit));
  return result;
}

// A source of rows.cuh. gate: what is activated; up: what that is multiplied with, if anything is. kUsual: SiLU of one
// half times the other and nothing else, which has kernels of its own: jumps over what else there is take as long as
// all of one token's row.
template <class T, bool kUsual>
struct Activated {
  struct Loaded {
    Chunk<T> gate, up;
  };
  RowsOf<const T> gate, up;
  Function function;
  Gate kind;
  float limit, rate, beta;

  bool wide() const { return gate.wide && up.wide; }
  template <bool kWhole>
  __device__ __forceinline__ Loaded load(uint32_t row, int64_t column, int after, int n) const {
    if (!kUsual && kind == Gate::kInterleaved) {
      const T* const both = gate.at(row, 2 * column) + 2 * after;
      return {load_chunk<kWhole>(both, 2 * n, gate.wide), load_chunk<kWhole>(both + kChunk, 2 * n - kChunk, gate.wide)};
    }
    return {load_chunk<kWhole>(gate.at(row, column) + after, n, gate.wide),
            load_chunk<kWhole>(up.at(row, column) + after, !kUsual && kind == Gate::kNone ? 0 : n, up.wide)};
  }
  template <int kCount>
  __device__ __forceinline__ void make(Loaded (&from)[kCount], Chunk<T> (&chunks)[kCount]) const {
    if constexpr (kUsual) {
      apply<Function::kSilu, true>(from, chunks);
    } else {
      if (kind == Gate::kInterleaved) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) separate(from[i]);
      }
      if (kind != Gate::kNone && limit == INFINITY && beta == 0.f) {
        by_function<true>(from, chunks);
      } else {
        by_function<false>(from, chunks);
      }
    }
  }
  template <bool kWhole>
  __device__ __forceinline__ void keep(const Chunk<T>&, uint32_t, int64_t, int, int) const {}
  __device__ __forceinline__ Chunk<T> again(uint32_t row, int64_t column, int n) const {
    Loaded loaded[] = {load<false>(row, column, 0, n)};
    Chunk<T> chunk[1];
    make(loaded, chunk);
    return chunk[0];
  }

 private:
  __device__ __forceinline__ static void separate(Loaded& both) {
    const Loaded mixed = both;
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const Chunk<T>& half = i < kChunk / 4 ? mixed.gate : mixed.up;
      const float2 a = pair(half, 2 * i % (kChunk / 2)), b = pair(half, (2 * i + 1) % (kChunk / 2));
      set_pair(both.gate, i, {a.x, b.x});
      set_pair(both.up, i, {a.y, b.y});
    }
  }

  // Decisions that are made outside of the loops over values. kPlain: there is a gate, but neither limit nor beta.
  template <bool kPlain, int kCount>
  __device__ __forceinline__ void by_function(const Loaded (&from)[kCount], Chunk<T> (&chunks)[kCount]) const {
    switch (function) {
      case Function::kSilu:
        return apply<Function::kSilu, kPlain>(from, chunks);
      case Function::kGelu:
        return apply<Function::kGelu, kPlain>(from, chunks);
      case Function::kGeluTanh:
        return apply<Function::kGeluTanh, kPlain>(from, chunks);
      default:
        return apply<Function::kRelu2, kPlain>(from, chunks);
    }
  }
  template <Function kFunction, bool kPlain, int kCount>
  __device__ __forceinline__ void apply(const Loaded (&from)[kCount], Chunk<T> (&chunks)[kCount]) const {
    const auto value = [&](float a, float b) {
      if constexpr (kPlain) return activate<T, kFunction>(a, rate) * b;
      a = activate<T, kFunction>(at_most(a, limit), rate);
      return kind == Gate::kNone ? a : a * (at_least(at_most(b, limit), -limit) + beta);
    };
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        const float2 a = pair(from[i].gate, j), b = pair(from[i].up, j);
        set_pair(chunks[i], j, {value(a.x, b.x), value(a.y, b.y)});
      }
    }
  }
};

struct Call {
  const char* op;
  Function function;
  Gate gate;
  float limit, alpha, beta;
  int64_t size;  // of a row of the result

  Call(const char* op, const Tensor& x, const std::string& function_name, const std::string& gate_name,
       const std::optional<double>& limit, double alpha, double beta)
      : op(op), limit(float(limit.value_or(INFINITY))), alpha(float(alpha)), beta(float(beta)) {
    check_floats(op, "x", x);
    const std::pair<const char*, Function> functions[] = {
        {"silu", Function::kSilu},
        {"gelu", Function::kGelu},
        {"gelu_tanh", Function::kGeluTanh},
        {"relu2", Function::kRelu2},
    };
    const std::pair<const char*, Gate> gates[] = {
        {"none", Gate::kNone},
        {"first", Gate::kFirst},
        {"second", Gate::kSecond},
        {"interleaved", Gate::kInterleaved},
    };
    CG_CHECK(find(functions, function_name, function), op, ": function is '", function_name,
             "'; it must be 'silu', 'gelu', 'gelu_tanh' or 'relu2'");
    CG_CHECK(find(gates, gate_name, gate), op, ": gate is '", gate_name,
             "'; it must be 'none', 'first', 'second' or 'interleaved'");
    CG_CHECK(!limit || *limit >= 0, op, ": limit is ", *limit, "; it must be zero or more");
    CG_CHECK(alpha == 1 || function == Function::kSilu, op, ": alpha is ", alpha,
             "; it must be 1, since only 'silu' has one");
    CG_CHECK(beta == 0 || gate != Gate::kNone, op, ": beta is ", beta,
             "; it must be 0, since with gate 'none' there is nothing to add it to");
    size = x.sizes().back();
    if (gate == Gate::kNone) return;
    CG_CHECK(size % 2 == 0, op, ": x is ", text(x.sizes()), "; its last dimension must be even, a gate for each value");
    size /= 2;
  }

  void run(const Tensor& x, const Output* out, const Quantization& to) const {
    const DeviceOf device(x);
    const Input source(x);
    with_float_type(x, [&](auto* element) {
      using T = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      const auto* const data = static_cast<const T*>(source.tensor.data_ptr());
      const bool paired = gate == Gate::kFirst || gate == Gate::kSecond;
      const auto low = rows_of<const T>(data, source.rows.stride, source.rows.count);
      const auto high = rows_of<const T>(data + (paired ? size : 0), source.rows.stride, source.rows.count);
      const bool swapped = gate == Gate::kSecond;
      const float rate = float(-kLog2OfE * double(alpha));
      const auto with = [&](auto usual) {
        const Activated<T, decltype(usual)::value> from = {
            swapped ? high : low, swapped ? low : high, function, gate, limit, rate, beta};
        run_rows<false, T>(op, from, source.rows.count, size, Norm{}, out ? out->of<T>() : RowsOf<T>{}, to,
                           device.stream);
      };
      const bool usual = function == Function::kSilu && paired && limit == INFINITY && beta == 0.f;
      usual ? with(std::true_type{}) : with(std::false_type{});
    });
  }

  std::vector<int64_t> shape(const Tensor& x) const {
    std::vector<int64_t> sizes = shape_of(x);
    sizes.back() = size;
    return sizes;
  }

  void check_result(const char* name, const Tensor& result, const Tensor& x) const {
    check_like(op, name, result, x, shape(x));
    check_apart(op, name, result, "x", x, gate == Gate::kNone);
  }

 private:
  template <class V, size_t N>
  static bool find(const std::pair<const char*, V> (&known)[N], const std::string& name, V& value) {
    for (const auto& [text, one] : known) {
      if (name == text) return value = one, true;
    }
    return false;
  }
};

Tensor activation(const Tensor& x, const std::string& function, const std::string& gate,
                  const std::optional<double>& limit, double alpha, double beta) {
  const Call call("activation", x, function, gate, limit, alpha, beta);
  const Output out(empty(call.shape(x), scalar_type(x), x));
  call.run(x, &out, {});
  return out.tensor;
}

void activation_out(const Tensor& out, const Tensor& x, const std::string& function, const std::string& gate,
                    const std::optional<double>& limit, double alpha, double beta) {
  const Call call("activation", x, function, gate, limit, alpha, beta);
  call.check_result("out", out, x);
  const Output to("activation", "out", out);
  call.run(x, &to, {});
}

std::tuple<Tensor, Tensor> activation_quant(const Tensor& x, const std::string& function, const std::string& gate,
                                            const std::optional<double>& limit, double alpha, double beta,
                                            const OptionalDtype& dtype, const OptionalTensor& scale,
                                            const std::string& granularity, int64_t group_size,
                                            const OptionalTensor& scale_ub, bool column_major_scale,
                                            bool power_of_two_scale, const OptionalTensor& activated) {
  constexpr auto* op = "activation_quant";
  const Call call(op, x, function, gate, limit, alpha, beta);
  if (activated) {
    call.check_result("activated", *activated, x);
    check_apart(op, "activated", *activated, "scale", scale);
    check_apart(op, "activated", *activated, "scale_ub", scale_ub);
  }
  const FusedCodes codes({op, scalar_type(dtype, ScalarType::Float8_e4m3fn), scale, granularity, group_size, scale_ub,
                          column_major_scale, power_of_two_scale},
                         x, call.size, "activated", activated);
  call.run(x, codes.out(), codes.to());
  return codes.result();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("activation", TORCH_BOX(&activation));
  m.impl("activation_out", TORCH_BOX(&activation_out));
  m.impl("activation_quant", TORCH_BOX(&activation_quant));
}

}  // namespace cutegemm
