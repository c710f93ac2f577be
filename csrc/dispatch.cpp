// The GEMM ops: check, look up the plan, allocate, launch the kernel file.
//
// Plans and kernel files come from Python (cutegemm/plan.py), through one callback. It is called for what the fast path
// does not know: a shape that has no plan yet, a kernel file that is not open yet, and every call that is not in order,
// so that the rules and the sentences about them are written down once, in cutegemm/gemm.py.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "torch_op.h"

namespace cutegemm {
namespace {

// --- what Python and this file tell each other; mirrored in plan.py ---

extern "C" {

struct cutegemm_tensor {
  int32_t present, dtype, cuda_index;  // torch's ScalarType; -1: not on a CUDA device
  int32_t dim;
  int64_t size[8], stride[8];
  uint64_t data;  // address
};

struct cutegemm_request {
  const char* op;
  int32_t product, out_dtype, fast_accum;  // out_dtype: torch's ScalarType, or -1 where the caller gave none
  int32_t gated, quantized;
  int32_t aligned_operands, aligned_out, device;
  int32_t minimum;           // this and
  int64_t n, k, group_size;  // these are of w4a16_mm, and else 0
  cutegemm_tensor a, b, scale_a, scale_b, bias, zero_point_a, sum_b, residual, zeros, permutation, out;
  const char* kernel;  // null: the plan chooses
};

struct cutegemm_plan_row {
  int32_t m_limit;  // this row is for m up to here
  const char* kernel;
  cutegemm_options options;
};

// Answers a request by calling the functions below. Returns 0, or not 0 and a sentence in text.
using cutegemm_resolver = int32_t (*)(const cutegemm_request*, char* text, int32_t text_size);
}

struct KernelFile {
  int32_t (*prepare)();
  int64_t (*workspace)(const cutegemm_call*);
  int32_t (*launch)(const cutegemm_call*);
  const char* (*error)(int32_t);
  std::string name;
  std::atomic<uint64_t> prepared{0};  // a bit for each device
};

struct PlanRow {
  int32_t m_limit;
  std::string kernel;
  cutegemm_options options;
  std::atomic<KernelFile*> file{nullptr};

  // Of a fused form: no kernel has all of it, or none that is as fast as two launches.
  bool separate() const { return kernel == "separate"; }
};

// What a plan depends on, besides m. A plan is never changed, only added, so rows may be used without the lock.
struct Key {
  int32_t n, k;
  uint8_t product, scales, gated, a, b, d, layout, fast_accum, aligned, device;
  bool operator==(const Key& o) const {
    return n == o.n && k == o.k && product == o.product && scales == o.scales && gated == o.gated && a == o.a &&
           b == o.b && d == o.d && layout == o.layout && fast_accum == o.fast_accum && aligned == o.aligned &&
           device == o.device;
  }
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = (uint64_t(uint32_t(key.n)) << 32 | uint32_t(key.k)) * 0x9E3779B97F4A7C15ull;
    for (uint8_t part : {key.product, key.scales, key.gated, key.a, key.b, key.d, key.layout, key.fast_accum,
                         key.aligned, key.device}) {
      h = (h ^ part) * 0x100000001B3ull;
    }
    return h ^ h >> 29;
  }
};
using Plan = std::vector<PlanRow>;

std::shared_mutex lock;
std::unordered_map<Key, std::unique_ptr<Plan>, KeyHash> plans;
std::unordered_map<std::string, std::unique_ptr<PlanRow>> named;  // rows for kernels that are asked for by name
std::unordered_map<std::string, std::unique_ptr<KernelFile>> files;
std::atomic<cutegemm_resolver> resolver{nullptr};

int multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> counts{};
  int count = counts[device % 64].load(std::memory_order_relaxed);
  if (count == 0) {
    check_cuda("cutegemm", cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    counts[device % 64] = count;
  }
  return count;
}

// --- one call ---

// The ops whose kernels there are, in the order of plan.py's PRODUCTS.
enum Product : uint8_t { kMm, kScaledMm, kW4a16Mm, kW8a16Mm };

// What a W4Weight has besides packed and scales, which are the Problem's b and scale_b.
struct Packed {
  const Tensor *zeros, *permutation;
  int64_t n, k, group_size;
  bool minimum;
};

struct Problem {
  const char* op;
  Product product;
  const Tensor &a, &b;  // of ops named for a weight x and the weight, (n, k) or packed
  const Tensor *scale_a = nullptr, *scale_b = nullptr, *bias = nullptr;
  const Tensor *zero_point_a = nullptr, *sum_b = nullptr, *residual = nullptr, *out = nullptr;
  OptionalDtype out_dtype;
  bool fast_accum = false;
  bool gated = false, quantized = false, power_of_two = false;  // quantized: out is codes, and `scale` their scales
  const Tensor* scale = nullptr;
  const std::string* kernel = nullptr;
  Packed packed = {};

  // What is read, but for a and the residual; null where it is absent.
  std::array<const Tensor*, 8> operands() const {
    return {&b, scale_a, scale_b, bias, zero_point_a, sum_b, packed.zeros, packed.permutation};
  }
};

cutegemm_tensor described(const Tensor* x) {
  cutegemm_tensor d = {};
  if (!x) return d;
  d.present = 1;
  d.dtype = int32_t(scalar_type(*x));
  d.cuda_index = x->is_cuda() ? x->get_device_index() : -1;
  d.dim = int32_t(x->dim());
  d.data = reinterpret_cast<uintptr_t>(x->data_ptr());
  for (int i = 0; i < d.dim && i < 8; ++i) d.size[i] = x->size(i), d.stride[i] = x->stride(i);
  return d;
}

constexpr uint8_t kOtherLayout = 9;  // for gemm_any alone

// The leading dimension's stride, free where that dimension has one row: then whatever suits the kernels.
int64_t leading(int64_t stride, int64_t rows, int64_t length) { return rows > 1 ? stride : (length + 15) / 16 * 16; }

bool aligned16(const void* data, int64_t stride, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * bytes % 16 == 0;
}

// Takes an operand of `rows` by k apart: 0 if k is contiguous, 1 if the rows are, kOtherLayout if neither is.
uint8_t orient(int64_t rows, int64_t k, int64_t& row_stride, int64_t& k_stride) {
  if (k_stride == 1 || k == 1) {
    k_stride = 1, row_stride = leading(row_stride, rows, k);
    return 0;
  }
  if (row_stride == 1 || rows == 1) {
    row_stride = 1, k_stride = leading(k_stride, k, rows);
    return 1;
  }
  return kOtherLayout;
}

// Scales or zero points: one element, or one for each of `count`; false: neither. Sets v.
bool read_vector(const Tensor& x, ScalarType type, int64_t count, bool row_too, cutegemm_vector& v) {
  if (scalar_type(x) != type) return false;
  int64_t const dim = x.dim(), size = x.numel();
  v.data = x.data_ptr();
  v.dtype = kernel_dtype(type);
  v.stride = 0;
  if (dim > 2) return false;
  if (size == 1) return true;
  if (size != count) return false;
  int const along = dim == 2 && x.size(1) == count ? 1 : 0;  // (count, 1), or (1, count) where it may be
  if (along == 1 && !row_too) return false;
  v.stride = x.stride(along);
  return x.size(along) == count;
}

bool is_output_type(ScalarType t) {
  return t == ScalarType::BFloat16 || t == ScalarType::Half || t == ScalarType::Float;
}

// What scales are for, as Key::scales and gemm.py's scales_of have it: all of k, or blocks of 128 k, and of b the
// blocks of 128 columns, or columns. Then, of an INT4 weight, what its group_of has: so many k.
enum Scales : uint8_t { kOfAllK, kOfBlocks, kOfGroups, kOf32, kOf64, kOf128, kOf32Minimum };
// What is added to one of the last four where scales have another type than x: not all kernels take them.
constexpr int kOtherType = 4;

bool is_exponent(ScalarType t) { return t == ScalarType::Float8_e8m0fnu || t == ScalarType::Byte; }

bool is_matrix(const Tensor& x, int64_t rows, int64_t columns) {
  return x.dim() == 2 && x.size(0) == rows && x.size(1) == columns;
}

Scales scales_of(const Tensor& a, const Tensor& b, int64_t m, int64_t n, int64_t k, bool residual) {
  int64_t const blocks = (k + 127) / 128, n_blocks = (n + 127) / 128;
  bool const one_block = k <= 128 && n > 128 && is_matrix(b, n_blocks, blocks);
  if (!((blocks != 1 || residual) && is_matrix(a, m, blocks)) && !one_block && !is_exponent(scalar_type(a)) &&
      !is_exponent(scalar_type(b))) {
    return kOfAllK;
  }
  return is_matrix(b, n_blocks, blocks) ? kOfBlocks : kOfGroups;
}

// (rows, blocks of k), of any strides.
bool read_scales(const Tensor& x, int64_t rows, int64_t blocks, int32_t group, cutegemm_vector& v) {
  bool const exponents = is_exponent(scalar_type(x));
  if (!is_matrix(x, rows, blocks) || (scalar_type(x) != ScalarType::Float && !exponents)) return false;
  v = {x.data_ptr(), exponents ? CUTEGEMM_E8M0 : CUTEGEMM_FP32, group, x.stride(0), x.stride(1)};
  return true;
}

// Where an INT8 product's sums, and with a zero point their difference from it, fit int32: see gemm.py.
constexpr int64_t kMostInt8 = (1 << 17) - 1, kMostInt8FromZeroPoint = 1 << 16;

// The sizes of a product, as they are read from operands of the right number of dimensions.
bool read_sizes(const Problem& p, cutegemm_call& call) {
  bool const packed = p.product == kW4a16Mm, transposed = p.product == kW8a16Mm;
  if (p.a.dim() != 2 || (!packed && p.b.dim() != 2)) return false;
  int64_t const m = p.a.size(0), k = p.a.size(1), n = packed ? p.packed.n : p.b.size(transposed ? 0 : 1);
  if ((packed ? p.packed.k : p.b.size(transposed ? 1 : 0)) != k) return false;
  if (n < 0 || m >= INT32_MAX || n >= INT32_MAX || k >= INT32_MAX) return false;
  call.m = int32_t(m), call.n = int32_t(n), call.k = int32_t(k);
  return true;
}

// The operands of scaled_mm and their scales.
bool read_scaled(const Problem& p, cutegemm_call& call, Scales& scales) {
  int64_t const m = call.m, n = call.n, k = call.k;
  bool const int8 = call.a_dtype == CUTEGEMM_INT8;
  bool const a_fp8 = call.a_dtype == CUTEGEMM_E4M3 || call.a_dtype == CUTEGEMM_E5M2;
  bool const b_fp8 = call.b_dtype == CUTEGEMM_E4M3 || call.b_dtype == CUTEGEMM_E5M2;
  if (int8 ? call.b_dtype != CUTEGEMM_INT8 || p.gated || p.quantized ||
                 k > (p.zero_point_a ? kMostInt8FromZeroPoint : kMostInt8)
           : !a_fp8 || !b_fp8 || (call.a_dtype == CUTEGEMM_E5M2 && call.b_dtype == CUTEGEMM_E5M2)) {
    return false;
  }
  if (p.zero_point_a || p.sum_b) {
    if (!int8 || !p.zero_point_a || !p.sum_b) return false;
    if (!read_vector(*p.zero_point_a, ScalarType::Int, m, false, call.zero_point_a)) return false;
    if (p.sum_b->dim() != 1 || p.sum_b->size(0) != n || scalar_type(*p.sum_b) != ScalarType::Int) return false;
    call.sum_b = {p.sum_b->data_ptr(), CUTEGEMM_INT32, 0, p.sum_b->stride(0)};
  }
  scales = int8 ? kOfAllK : scales_of(*p.scale_a, *p.scale_b, m, n, k, p.residual != nullptr);
  if (scales == kOfAllK) {
    return read_vector(*p.scale_a, ScalarType::Float, m, false, call.scale_a) &&
           read_vector(*p.scale_b, ScalarType::Float, n, true, call.scale_b);
  }
  int64_t const blocks = (k + 127) / 128, rows_b = scales == kOfBlocks ? (n + 127) / 128 : n;
  return read_scales(*p.scale_a, m, blocks, 1, call.scale_a) &&
         read_scales(*p.scale_b, rows_b, blocks, scales == kOfBlocks ? 128 : 1, call.scale_b);
}

bool is_contiguous(const Tensor& x, ScalarType type, std::initializer_list<int64_t> sizes) {
  return scalar_type(x) == type && x.sizes().equals(Sizes(sizes)) && x.is_contiguous();
}

// The parts of a W4Weight, as packing.py's check_packed has them.
bool read_packed(const Problem& p, cutegemm_call& call, Scales& scales) {
  auto const& w = p.packed;
  int64_t const n = call.n, k = call.k, all = std::max<int64_t>(k, 1);
  int64_t const size = w.group_size == -1 ? all : w.group_size;
  if (size != 32 && size != 64 && size != 128 && size != 256 && size != all) return false;
  int64_t const tiles = (n + 63) / 64 * 4, groups = (k + size - 1) / size;
  ScalarType const type = scalar_type(*p.scale_b);
  if (!is_contiguous(p.b, ScalarType::Int, {tiles, (k + 63) / 64, 32, 4}) || !is_output_type(type) ||
      !is_contiguous(*p.scale_b, type, {tiles, groups, 16}) || (w.minimum && !w.zeros) ||
      (w.zeros && !is_contiguous(*w.zeros, type, {tiles, groups, 16})) ||
      (w.permutation && !is_contiguous(*w.permutation, ScalarType::Int, {k}))) {
    return false;
  }
  call.b_dtype = CUTEGEMM_INT4;
  call.groups = {p.scale_b->data_ptr(), w.zeros ? w.zeros->data_ptr() : nullptr, kernel_dtype(type), int32_t(size),
                 w.minimum};
  auto const wide = [&](int64_t step) { return size >= k || size % step == 0; };
  int const of_steps = w.minimum ? kOf32Minimum : wide(128) ? kOf128 : wide(64) ? kOf64 : kOf32;
  scales = Scales(of_steps + (type == scalar_type(p.a) ? 0 : kOtherType));
  return true;
}

// The weight of w8a16_mm and its scale.
bool read_weight(const Problem& p, cutegemm_call& call, Scales& scales) {
  int64_t const n = call.n, k = call.k;
  if (call.b_dtype != CUTEGEMM_E4M3 && call.b_dtype != CUTEGEMM_INT8) return false;
  if (k > 1 && p.b.stride(1) != 1) return false;
  call.b_stride[0] = 1, call.b_stride[1] = leading(p.b.stride(0), n, k);
  if (read_vector(*p.scale_b, ScalarType::Float, n, false, call.scale_b)) return true;
  scales = kOfBlocks;
  return scalar_type(*p.scale_b) == ScalarType::Float &&
         read_scales(*p.scale_b, (n + 127) / 128, (k + 127) / 128, 128, call.scale_b);
}

// Fills what does not depend on the output's memory. False: the call is not in order, and gemm.py can say why.
bool prepare(const Problem& p, cutegemm_call& call, Key& key, ScalarType& d) {
  if (!read_sizes(p, call)) return false;
  int64_t const m = call.m, n = call.n, k = call.k;
  auto const operands = p.operands();
  auto const elsewhere = [&](const Tensor* x) {
    return x && (!x->is_cuda() || x->get_device_index() != p.a.get_device_index());
  };
  if (elsewhere(p.residual) || elsewhere(p.out) || std::any_of(operands.begin(), operands.end(), elsewhere)) {
    return false;
  }
  ScalarType const a_type = scalar_type(p.a), b_type = scalar_type(p.b);
  call.a_dtype = kernel_dtype(a_type), call.b_dtype = kernel_dtype(b_type);
  bool const scaled = p.product == kScaledMm, of_weight = p.product == kW4a16Mm || p.product == kW8a16Mm;
  Scales scales = kOfAllK;
  if (scaled) {
    if (!read_scaled(p, call, scales)) return false;
  } else if ((a_type != ScalarType::BFloat16 && a_type != ScalarType::Half) || (!of_weight && a_type != b_type)) {
    return false;
  } else if (of_weight && !(p.product == kW4a16Mm ? read_packed(p, call, scales) : read_weight(p, call, scales))) {
    return false;
  }
  if (p.bias) {
    if (p.bias->dim() != 1 || p.bias->size(0) != n || !is_output_type(scalar_type(*p.bias))) return false;
    call.bias = {p.bias->data_ptr(), kernel_dtype(scalar_type(*p.bias)), 0, p.bias->stride(0)};
  }
  if (p.residual) {
    if (scaled && scales == kOfAllK) return false;
    if (!is_matrix(*p.residual, m, n) || !is_output_type(scalar_type(*p.residual))) return false;
    call.residual = {
        p.residual->data_ptr(), kernel_dtype(scalar_type(*p.residual)), {p.residual->stride(0), p.residual->stride(1)}};
  }
  if (p.gated && n % 2 != 0) return false;
  int64_t const width = p.gated ? n / 2 : n;
  ScalarType const by_default = p.out ? scalar_type(*p.out) : scaled ? ScalarType::BFloat16 : a_type;
  d = p.quantized ? ScalarType::Float8_e4m3fn : scalar_type(p.out_dtype, by_default);
  if (!p.quantized && !is_output_type(d)) return false;
  call.d_dtype = kernel_dtype(d);

  call.a = p.a.data_ptr(), call.b = p.b.data_ptr();
  call.a_stride[0] = p.a.stride(0), call.a_stride[1] = p.a.stride(1);
  uint8_t a_layout = orient(m, k, call.a_stride[0], call.a_stride[1]), b_layout = 0;
  bool aligned = true;  // of x of ops named for a weight replaced_operands() sees to it, and of packed weights
  if (of_weight) {
    a_layout = 0;
    aligned = p.product == kW4a16Mm || (aligned16(call.b, call.b_stride[1], 1) && call.b_stride[1] >= k);
  } else {
    call.b_stride[0] = p.b.stride(0), call.b_stride[1] = p.b.stride(1);
    b_layout = orient(n, k, call.b_stride[1], call.b_stride[0]);
    if (scaled && b_layout == 1 && n > 1 && k > 1) return false;  // a row-major b
    int64_t const bytes = scaled ? 1 : 2;
    // TMA takes no rows that overlap.
    int64_t const a_lead = call.a_stride[a_layout == 1], b_lead = call.b_stride[b_layout == 0];
    aligned = aligned16(call.a, a_lead, bytes) && aligned16(call.b, b_lead, bytes) &&
              a_lead >= (a_layout == 1 ? m : k) && b_lead >= (b_layout == 1 ? n : k);
  }
  if (p.out) {
    if (p.out->dim() != 2 || p.out->size(0) != m || p.out->size(1) != width || scalar_type(*p.out) != d) return false;
    call.d_stride[0] = p.out->stride(0), call.d_stride[1] = p.out->stride(1);
    bool const rows_apart =
        width <= 1 || (call.d_stride[1] > 0 && (m <= 1 || call.d_stride[0] >= width * call.d_stride[1]));
    bool const columns_apart =
        m <= 1 || (call.d_stride[0] > 0 && (width <= 1 || call.d_stride[1] >= m * call.d_stride[0]));
    if (!rows_apart && !columns_apart) return false;
    auto const shares = [&](const Tensor* x) { return x && is_in_memory_of(*p.out, *x); };
    if (shares(&p.a) || std::any_of(operands.begin(), operands.end(), shares)) return false;
    // Each element of a residual is read by the thread that writes it, so out may be the residual itself.
    auto const strides_agree = [&](int i) { return p.out->size(i) <= 1 || p.residual->stride(i) == p.out->stride(i); };
    bool const in_place = p.residual && p.residual->data_ptr() == p.out->data_ptr() && scalar_type(*p.residual) == d &&
                          strides_agree(0) && strides_agree(1);
    if (!in_place && shares(p.residual)) return false;
    if (width == 1) call.d_stride[1] = 1;
  } else {
    call.d_stride[0] = width, call.d_stride[1] = 1;
  }
  if (m == 1 && call.d_stride[1] == 1) call.d_stride[0] = leading(0, 1, width);

  int64_t const d_bytes = d == ScalarType::Float ? 4 : p.quantized ? 1 : 2;
  // A new output starts at the allocator's alignment. TMA stores whole pieces of 16 bytes, so rows must end with one
  // too.
  bool const aligned_out = call.d_stride[1] == 1 && width * d_bytes % 16 == 0 &&
                           aligned16(p.out ? p.out->data_ptr() : nullptr, call.d_stride[0], d_bytes);
  key = {call.n,
         call.k,
         p.product,
         scales,
         p.gated,
         uint8_t(call.a_dtype),
         uint8_t(call.b_dtype),
         uint8_t(call.d_dtype),
         uint8_t(a_layout * 16 + b_layout),
         p.fast_accum && call.a_dtype != CUTEGEMM_INT8 && scales == kOfAllK,
         uint8_t(aligned * 2 + aligned_out),
         uint8_t(p.a.get_device_index())};
  return true;
}

// Has Python make good what is missing, or throws its sentence.
void resolve(const Problem& p, const Key& key) {
  cutegemm_resolver const ask = resolver.load();
  CG_CHECK(ask, p.op, ": cutegemm's Python package is not loaded, so there are no plans; import cutegemm first");
  cutegemm_request request = {};
  request.op = p.op;
  request.product = p.product, request.gated = p.gated, request.quantized = p.quantized;
  request.out_dtype = p.out_dtype.value_or(-1);
  request.fast_accum = key.fast_accum;
  request.aligned_operands = key.aligned / 2, request.aligned_out = key.aligned % 2;
  request.device = p.a.get_device_index();
  request.a = described(&p.a), request.b = described(&p.b);
  request.scale_a = described(p.scale_a), request.scale_b = described(p.scale_b);
  request.zero_point_a = described(p.zero_point_a), request.sum_b = described(p.sum_b);
  request.zeros = described(p.packed.zeros), request.permutation = described(p.packed.permutation);
  request.n = p.packed.n, request.k = p.packed.k;
  request.group_size = p.packed.group_size, request.minimum = p.packed.minimum;
  request.bias = described(p.bias), request.residual = described(p.residual), request.out = described(p.out);
  request.kernel = p.kernel ? p.kernel->c_str() : nullptr;
  std::string text(8192, '\0');
  if (ask(&request, text.data(), int32_t(text.size())) != 0) fail(text.c_str());
}

PlanRow* find(const Problem& p, const Key& key, int m) {
  std::shared_lock<std::shared_mutex> guard(lock);
  if (p.kernel) {
    auto const it = named.find(*p.kernel);
    return it == named.end() ? nullptr : it->second.get();
  }
  auto const it = plans.find(key);
  if (it == plans.end()) return nullptr;
  for (PlanRow& row : *it->second) {
    if (m <= row.m_limit) return row.file.load(std::memory_order_acquire) || row.separate() ? &row : nullptr;
  }
  return nullptr;
}

const PlanRow& planned(const Problem& p, const cutegemm_call& call, const Key& key) {
  // Where a kernel is asked for by name, Python checks each call that it takes the problem.
  PlanRow* row = p.kernel ? nullptr : find(p, key, call.m);
  if (!row) {
    resolve(p, key);
    row = find(p, key, call.m);
    CG_CHECK(row && (row->file || row->separate()), p.op, ": no kernel was found for m = ", call.m, ", n = ", call.n,
             ", k = ", call.k);
  }
  return *row;
}

void run(const Problem& p, cutegemm_call& call, const PlanRow& row, void* d, const DeviceOf& device) {
  KernelFile* const file = row.file.load(std::memory_order_acquire);
  uint64_t const bit = 1ull << (device.index % 64);
  if (!(file->prepared.load(std::memory_order_acquire) & bit)) {
    // Loading code is not allowed while this thread captures a graph, except like this.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    int32_t const status = file->prepare();
    cudaThreadExchangeStreamCaptureMode(&mode);
    CG_CHECK(status == 0, p.op, ": kernel ", file->name, " could not be loaded: ", file->error(status));
    file->prepared.fetch_or(bit, std::memory_order_acq_rel);
  }
  call.d = d;
  call.output.gated = p.gated;
  if (p.scale) {
    call.output.scale = static_cast<float*>(p.scale->data_ptr());
    call.output.scale_stride[0] = p.scale->stride(0), call.output.scale_stride[1] = p.scale->stride(1);
    call.output.power_of_two = p.power_of_two;
  }
  call.options = row.options;
  if (!chain_launches.load(std::memory_order_relaxed)) call.options.no_chain = 1;
  call.sm_count = multiprocessors(device.index);
  call.stream = device.stream;
  std::optional<Tensor> workspace;
  if (int64_t const bytes = file->workspace(&call)) {
    workspace = empty({bytes}, ScalarType::Byte, p.a);
    call.workspace = workspace->data_ptr();
  }
  int32_t const status = file->launch(&call);
  CG_CHECK(status == 0, p.op, ": kernel ", file->name, " was not launched for m = ", call.m, ", n = ", call.n,
           ", k = ", call.k, ": ", file->error(status));
}

// A call in order, ready but for the output's memory.
struct Ready {
  cutegemm_call call = {};
  Key key = {};
  ScalarType d;

  explicit Ready(const Problem& p) {
    if (prepare(p, call, key, d)) return;
    resolve(p, key);
    fail(p.op, ": the call was found to be in order, but not by the dispatcher; please report this");
  }
};

// Another op, with its arguments in the order of its schema.
template <class... Arguments>
std::array<StableIValue, sizeof...(Arguments)> call_op(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack = {torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return stack;
}

// What the kernels of ops named for a weight get in place of operands that they don't read as they are: copies of an x
// whose rows are not at multiples of 16 bytes, or whose columns are not neighbours, or permuted, and of parts of a
// packed weight at other addresses; and where k is 0, a column of zeros.
std::vector<Tensor> replaced_operands(const Problem& p, cutegemm_call& call) {
  std::vector<Tensor> made;
  if (call.k == 0) {
    auto const zeros = [&](std::initializer_list<int64_t> sizes, ScalarType type) {
      Tensor x = empty(Sizes(sizes), type, p.a);
      torch::stable::zero_(x);
      return made.emplace_back(x).data_ptr();
    };
    int64_t const m = call.m, n = call.n, tiles = (n + 63) / 64 * 4;
    call.k = 1;
    call.a = zeros({m, 8}, scalar_type(p.a)), call.a_stride[0] = 8;
    if (p.product == kW4a16Mm) {
      call.b = zeros({tiles, 1, 32, 4}, ScalarType::Int);
      call.groups.scales = zeros({tiles, 1, 16}, ScalarType::Float), call.groups.dtype = CUTEGEMM_FP32;
      if (p.packed.zeros) call.groups.zeros = call.groups.scales;  // also of an empty one, which has no address
    } else {
      call.b = zeros({n, 16}, ScalarType::Byte), call.b_stride[1] = 16;
      if (call.scale_b.group) call.scale_b = {zeros({1}, ScalarType::Float), CUTEGEMM_FP32, call.scale_b.group, 0, 0};
    }
    return made;
  }
  if (p.packed.permutation || call.a_stride[1] != 1 || call.a_stride[0] < call.k ||
      !aligned16(call.a, call.a_stride[0], 2)) {
    auto const order = p.packed.permutation ? std::optional<Tensor>(*p.packed.permutation) : std::nullopt;
    auto const stack = call_op("cutegemm::gather_columns", p.a, order);
    Tensor const& x = made.emplace_back(torch::stable::detail::to<Tensor>(stack[0]));
    call.a = x.data_ptr(), call.a_stride[0] = x.stride(0), call.a_stride[1] = 1;
  }
  if (p.product == kW4a16Mm) {
    auto const part = [&](const Tensor* x, const void*& data) {
      if (!aligned16(data, 0, 1)) data = made.emplace_back(torch::stable::clone(*x)).data_ptr();
    };
    part(&p.b, call.b), part(p.scale_b, call.groups.scales), part(p.packed.zeros, call.groups.zeros);
  }
  return made;
}

// p.out, or a new tensor. row: of the call, where it is known.
std::optional<Tensor> execute(const Problem& p, Ready ready, const PlanRow* row = nullptr) {
  auto& [call, key, d] = ready;
  DeviceOf const device(p.a);
  std::optional<Tensor> made;
  if (!p.out) {
    int64_t const sizes[2] = {call.m, p.gated ? call.n / 2 : call.n};
    made = empty(Sizes(sizes, 2), d, p.a);
  }
  if (call.m == 0 || call.n == 0) {
    resolve(p, key);
  } else {
    PlanRow const& chosen = row ? *row : planned(p, call, key);
    std::vector<Tensor> replaced;
    if (p.product == kW4a16Mm || p.product == kW8a16Mm) replaced = replaced_operands(p, call);
    run(p, call, chosen, p.out ? p.out->data_ptr() : made->data_ptr(), device);
  }
  return made;
}

// The plan's row for a fused form; null where its sums are a launch of their own.
const PlanRow* fused_row(const Problem& p, const Ready& ready) {
  if (ready.call.m == 0 || ready.call.n == 0) return nullptr;
  PlanRow const& row = planned(p, ready.call, ready.key);
  return row.separate() ? nullptr : &row;
}

template <class T>
const T* pointer(const std::optional<T>& x) {
  return x ? &*x : nullptr;
}

Tensor mm(Tensor a, Tensor b, std::optional<Tensor> bias, OptionalDtype out_dtype, std::optional<std::string> kernel) {
  Problem p{"mm", kMm, a, b};
  p.bias = pointer(bias), p.out_dtype = out_dtype, p.kernel = pointer(kernel);
  return *execute(p, Ready(p));
}

void mm_out(Tensor out, Tensor a, Tensor b, std::optional<Tensor> bias, OptionalDtype out_dtype,
            std::optional<std::string> kernel) {
  Problem p{"mm", kMm, a, b};
  p.bias = pointer(bias), p.out = &out, p.out_dtype = out_dtype, p.kernel = pointer(kernel);
  execute(p, Ready(p));
}

Tensor scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, std::optional<Tensor> bias,
                 OptionalDtype out_dtype, bool use_fast_accum, std::optional<Tensor> zero_point_a,
                 std::optional<Tensor> sum_b, std::optional<Tensor> residual, std::optional<std::string> kernel) {
  Problem p{"scaled_mm", kScaledMm, a, b, &scale_a, &scale_b};
  p.bias = pointer(bias), p.out_dtype = out_dtype, p.fast_accum = use_fast_accum;
  p.zero_point_a = pointer(zero_point_a), p.sum_b = pointer(sum_b), p.residual = pointer(residual),
  p.kernel = pointer(kernel);
  return *execute(p, Ready(p));
}

void scaled_mm_out(Tensor out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, std::optional<Tensor> bias,
                   OptionalDtype out_dtype, bool use_fast_accum, std::optional<Tensor> zero_point_a,
                   std::optional<Tensor> sum_b, std::optional<Tensor> residual, std::optional<std::string> kernel) {
  Problem p{"scaled_mm", kScaledMm, a, b, &scale_a, &scale_b};
  p.bias = pointer(bias), p.out = &out, p.out_dtype = out_dtype, p.fast_accum = use_fast_accum;
  p.zero_point_a = pointer(zero_point_a), p.sum_b = pointer(sum_b), p.residual = pointer(residual),
  p.kernel = pointer(kernel);
  execute(p, Ready(p));
}

// A fused form's sums in float32, so that they are rounded once, too.
Tensor sums_of(Problem p) {
  p.out = nullptr, p.kernel = nullptr, p.out_dtype = int32_t(ScalarType::Float);
  p.gated = p.quantized = false, p.fast_accum = true;
  return *execute(p, Ready(p));
}

// silu of the first half of the columns of x times the second half.
void gate(Tensor& out, const Tensor& x) {
  auto const stack =
      call_op("cutegemm::activation", x, std::string("silu"), std::string("first"), std::optional<double>(), 1.0, 0.0);
  torch::stable::copy_(out, torch::stable::detail::to<Tensor>(stack[0]));
}

// p.out, or a new tensor.
std::optional<Tensor> gated(const Problem& p) {
  Ready const ready(p);
  if (auto const* row = fused_row(p, ready)) return execute(p, ready, row);
  std::optional<Tensor> made;
  if (!p.out) made = empty({ready.call.m, ready.call.n / 2}, ready.d, p.a);
  Tensor out = p.out ? *p.out : *made;
  gate(out, sums_of(p));
  return made;
}

Tensor scaled_mm_silu_and_mul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, std::optional<Tensor> bias,
                              OptionalDtype out_dtype, std::optional<std::string> kernel) {
  Problem p{"scaled_mm_silu_and_mul", kScaledMm, a, b, &scale_a, &scale_b};
  p.bias = pointer(bias), p.out_dtype = out_dtype, p.gated = true, p.kernel = pointer(kernel);
  return *gated(p);
}

void scaled_mm_silu_and_mul_out(Tensor out, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b,
                                std::optional<Tensor> bias, OptionalDtype out_dtype,
                                std::optional<std::string> kernel) {
  Problem p{"scaled_mm_silu_and_mul", kScaledMm, a, b, &scale_a, &scale_b};
  p.bias = pointer(bias), p.out = &out, p.out_dtype = out_dtype, p.gated = true, p.kernel = pointer(kernel);
  gated(p);
}

Tensor w4a16_mm(Tensor x, Tensor packed, Tensor scales, std::optional<Tensor> zeros, std::optional<Tensor> permutation,
                int64_t n, int64_t k, int64_t group_size, bool minimum, std::optional<Tensor> bias,
                OptionalDtype out_dtype, std::optional<Tensor> residual, std::optional<std::string> kernel) {
  Problem p{"w4a16_mm", kW4a16Mm, x, packed, nullptr, &scales};
  p.packed = {pointer(zeros), pointer(permutation), n, k, group_size, minimum};
  p.bias = pointer(bias), p.residual = pointer(residual), p.out_dtype = out_dtype, p.kernel = pointer(kernel);
  return *execute(p, Ready(p));
}

void w4a16_mm_out(Tensor out, Tensor x, Tensor packed, Tensor scales, std::optional<Tensor> zeros,
                  std::optional<Tensor> permutation, int64_t n, int64_t k, int64_t group_size, bool minimum,
                  std::optional<Tensor> bias, OptionalDtype out_dtype, std::optional<Tensor> residual,
                  std::optional<std::string> kernel) {
  Problem p{"w4a16_mm", kW4a16Mm, x, packed, nullptr, &scales};
  p.packed = {pointer(zeros), pointer(permutation), n, k, group_size, minimum};
  p.bias = pointer(bias), p.residual = pointer(residual), p.out = &out, p.out_dtype = out_dtype,
  p.kernel = pointer(kernel);
  execute(p, Ready(p));
}

Tensor w4a16_mm_silu_and_mul(Tensor x, Tensor packed, Tensor scales, std::optional<Tensor> zeros,
                             std::optional<Tensor> permutation, int64_t n, int64_t k, int64_t group_size, bool minimum,
                             std::optional<Tensor> bias, OptionalDtype out_dtype, std::optional<std::string> kernel) {
  Problem p{"w4a16_mm_silu_and_mul", kW4a16Mm, x, packed, nullptr, &scales};
  p.packed = {pointer(zeros), pointer(permutation), n, k, group_size, minimum};
  p.bias = pointer(bias), p.out_dtype = out_dtype, p.gated = true, p.kernel = pointer(kernel);
  return *gated(p);
}

void w4a16_mm_silu_and_mul_out(Tensor out, Tensor x, Tensor packed, Tensor scales, std::optional<Tensor> zeros,
                               std::optional<Tensor> permutation, int64_t n, int64_t k, int64_t group_size,
                               bool minimum, std::optional<Tensor> bias, OptionalDtype out_dtype,
                               std::optional<std::string> kernel) {
  Problem p{"w4a16_mm_silu_and_mul", kW4a16Mm, x, packed, nullptr, &scales};
  p.packed = {pointer(zeros), pointer(permutation), n, k, group_size, minimum};
  p.bias = pointer(bias), p.out = &out, p.out_dtype = out_dtype, p.gated = true, p.kernel = pointer(kernel);
  gated(p);
}

Tensor w8a16_mm(Tensor x, Tensor w, Tensor scale, std::optional<Tensor> bias, OptionalDtype out_dtype,
                std::optional<Tensor> residual, std::optional<std::string> kernel) {
  Problem p{"w8a16_mm", kW8a16Mm, x, w, nullptr, &scale};
  p.bias = pointer(bias), p.residual = pointer(residual), p.out_dtype = out_dtype, p.kernel = pointer(kernel);
  return *execute(p, Ready(p));
}

void w8a16_mm_out(Tensor out, Tensor x, Tensor w, Tensor scale, std::optional<Tensor> bias, OptionalDtype out_dtype,
                  std::optional<Tensor> residual, std::optional<std::string> kernel) {
  Problem p{"w8a16_mm", kW8a16Mm, x, w, nullptr, &scale};
  p.bias = pointer(bias), p.residual = pointer(residual), p.out = &out, p.out_dtype = out_dtype,
  p.kernel = pointer(kernel);
  execute(p, Ready(p));
}

std::tuple<Tensor, Tensor> scaled_mm_quant(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b,
                                           std::optional<Tensor> bias, bool silu_and_mul, bool power_of_two_scale,
                                           std::optional<std::string> kernel) {
  Problem p{"scaled_mm_quant", kScaledMm, a, b, &scale_a, &scale_b};
  p.bias = pointer(bias), p.kernel = pointer(kernel);
  p.quantized = true, p.gated = silu_and_mul, p.power_of_two = power_of_two_scale;
  Ready const ready(p);
  if (auto const* row = fused_row(p, ready)) {
    int64_t const m = a.size(0), width = silu_and_mul ? b.size(1) / 2 : b.size(1), groups = (width + 127) / 128;
    int64_t const pitch = (m + 3) / 4 * 4, sizes[2] = {m, groups}, strides[2] = {1, pitch};
    Tensor const scale = empty_strided(Sizes(sizes, 2), Sizes(strides, 2), ScalarType::Float, a);
    p.scale = &scale;
    return {*execute(p, ready, row), scale};
  }
  Tensor const sums = sums_of(p);
  std::optional<Tensor> const none;
  auto const codes = [](const auto& stack) {
    return std::tuple(torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1]));
  };
  if (silu_and_mul) {
    return codes(call_op("cutegemm::activation_quant", sums, std::string("silu"), std::string("first"),
                         std::optional<double>(), 1.0, 0.0, OptionalDtype(), none, std::string("group"), int64_t(128),
                         none, true, power_of_two_scale, none));
  }
  return codes(call_op("cutegemm::quantize_fp8", sums, none, std::string("group"), int64_t(128), none, true,
                       power_of_two_scale));
}

}  // namespace
}  // namespace cutegemm

// --- called by plan.py ---

#define CUTEGEMM_API extern "C" __attribute__((visibility("default")))

CUTEGEMM_API void cutegemm_set_resolver(cutegemm::cutegemm_resolver resolve) { cutegemm::resolver = resolve; }

// Opens a kernel file under its name. Returns 0, or not 0 and a sentence.
CUTEGEMM_API int32_t cutegemm_open(const char* name, const char* path, char* text, int32_t text_size) {
  using namespace cutegemm;
  auto const refuse = [&](const std::string& why) {
    std::snprintf(text, size_t(text_size), "kernel file %s: %s", path, why.c_str());
    return 1;
  };
  std::unique_lock<std::shared_mutex> guard(lock);
  auto& file = files[name];
  if (!file) {
    void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return refuse(dlerror());
    auto const symbol = [&](const char* of) { return dlsym(handle, of); };
    auto const get_name = reinterpret_cast<const char* (*)()>(symbol("cutegemm_name"));
    auto const get_abi = reinterpret_cast<int32_t (*)()>(symbol("cutegemm_abi"));
    if (!get_name || !get_abi) return refuse("it is not a kernel file");
    if (get_abi() != CUTEGEMM_ABI) return refuse("it was built for another version of cutegemm");
    if (std::string_view(get_name()) != name) return refuse(std::string("it holds ") + get_name() + " instead");
    auto opened = std::make_unique<KernelFile>();
    opened->name = name;
    opened->prepare = reinterpret_cast<int32_t (*)()>(symbol("cutegemm_prepare"));
    opened->workspace = reinterpret_cast<int64_t (*)(const cutegemm_call*)>(symbol("cutegemm_workspace"));
    opened->launch = reinterpret_cast<int32_t (*)(const cutegemm_call*)>(symbol("cutegemm_launch"));
    opened->error = reinterpret_cast<const char* (*)(int32_t)>(symbol("cutegemm_error"));
    if (!opened->prepare || !opened->workspace || !opened->launch || !opened->error) {
      return refuse("it lacks a function of kernel_abi.h");
    }
    file = std::move(opened);
  }
  auto const give = [&](PlanRow& row) {
    if (row.kernel == name) row.file.store(file.get(), std::memory_order_release);
  };
  for (auto& [key, plan] : plans) std::for_each(plan->begin(), plan->end(), give);
  for (auto& [key, row] : named) give(*row);
  return 0;
}

// Adds the plan for a request's shape, from rows in ascending order of m_limit, or a row under the request's kernel
// name.
CUTEGEMM_API void cutegemm_add_plan(const cutegemm::cutegemm_request* request, const cutegemm::cutegemm_plan_row* rows,
                                    int32_t count, int32_t n, int32_t k, int32_t layout, int32_t scales, int32_t a,
                                    int32_t b, int32_t d) {
  using namespace cutegemm;
  std::unique_lock<std::shared_mutex> guard(lock);
  auto const fill = [&](PlanRow& row, const cutegemm_plan_row& from) {
    row.m_limit = from.m_limit;
    row.kernel = from.kernel;
    row.options = from.options;
    auto const it = files.find(row.kernel);
    row.file = it == files.end() ? nullptr : it->second.get();
  };
  if (request->kernel) {
    auto row = std::make_unique<PlanRow>();
    fill(*row, rows[0]);
    named.emplace(request->kernel, std::move(row));
    return;
  }
  Key const key = {n,
                   k,
                   uint8_t(request->product),
                   uint8_t(scales),
                   uint8_t(request->gated),
                   uint8_t(a),
                   uint8_t(b),
                   uint8_t(d),
                   uint8_t(layout),
                   uint8_t(request->fast_accum),
                   uint8_t(request->aligned_operands * 2 + request->aligned_out),
                   uint8_t(request->device)};
  auto plan = std::make_unique<Plan>(count);
  for (int i = 0; i < count; ++i) fill((*plan)[i], rows[i]);
  plans.emplace(key, std::move(plan));
}

STABLE_TORCH_LIBRARY_IMPL(cutegemm, CUDA, m) {
  m.impl("mm", TORCH_BOX(&cutegemm::mm));
  m.impl("mm_out", TORCH_BOX(&cutegemm::mm_out));
  m.impl("scaled_mm", TORCH_BOX(&cutegemm::scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&cutegemm::scaled_mm_out));
  m.impl("scaled_mm_silu_and_mul", TORCH_BOX(&cutegemm::scaled_mm_silu_and_mul));
  m.impl("scaled_mm_silu_and_mul_out", TORCH_BOX(&cutegemm::scaled_mm_silu_and_mul_out));
  m.impl("scaled_mm_quant", TORCH_BOX(&cutegemm::scaled_mm_quant));
  m.impl("w4a16_mm", TORCH_BOX(&cutegemm::w4a16_mm));
  m.impl("w4a16_mm_out", TORCH_BOX(&cutegemm::w4a16_mm_out));
  m.impl("w4a16_mm_silu_and_mul", TORCH_BOX(&cutegemm::w4a16_mm_silu_and_mul));
  m.impl("w4a16_mm_silu_and_mul_out", TORCH_BOX(&cutegemm::w4a16_mm_silu_and_mul_out));
  m.impl("w8a16_mm", TORCH_BOX(&cutegemm::w8a16_mm));
  m.impl("w8a16_mm_out", TORCH_BOX(&cutegemm::w8a16_mm_out));
}
