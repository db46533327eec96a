// What XLA calls: checks of the operands' shapes, then a job on the client's own threads.
#include <exception>
#include <string>

#include "expert_mlp.h"
#include "linear.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace moe_ladder {
namespace {

using Bf16Buffer = ffi::Buffer<ffi::BF16>;

const bf16* data(const Bf16Buffer& buffer) { return static_cast<const bf16*>(buffer.untyped_data()); }

bf16* aligned(void* scratch) { return reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(scratch) + 63) & ~uintptr_t{63}); }

ffi::Error shape_error(const char* what) { return ffi::Error::InvalidArgument(std::string("native kernel: ") + what); }

// The scratch is a result, so that XLA plans its memory; its size is computed in Python and checked here.
bool holds(const ffi::Result<ffi::Buffer<ffi::U8>>& scratch, int64_t elements) {
  return static_cast<int64_t>(scratch->size_bytes()) >= elements * static_cast<int64_t>(sizeof(bf16)) + 64;
}

ffi::Error expert_mlp(ffi::ThreadPool pool, Bf16Buffer x, Bf16Buffer w_gate_up, Bf16Buffer w_down,
                      ffi::Buffer<ffi::S32> group_sizes, ffi::Result<Bf16Buffer> out,
                      ffi::Result<ffi::Buffer<ffi::U8>> scratch, int32_t activation, int32_t max_threads) {
  const auto xd = x.dimensions(), gd = w_gate_up.dimensions(), dd = w_down.dimensions();
  if (xd.size() != 2 || gd.size() != 3 || dd.size() != 3 || group_sizes.dimensions().size() != 1)
    return shape_error("expert_mlp takes x [N, D], w_gate_up [E, 2F, D], w_down [E, D, F], group_sizes [E]");
  const MlpShape s{xd[0], gd[0], xd[1], dd[2]};
  if (gd[1] != 2 * s.f || gd[2] != s.d || dd[0] != s.num_experts || dd[1] != s.d ||
      group_sizes.dimensions()[0] != s.num_experts || out->element_count() != x.element_count())
    return shape_error("the operands of expert_mlp do not fit together");
  if (!holds(scratch, scratch_elements(s))) return shape_error("the scratch of expert_mlp is too small");
  if (activation < 0 || activation > 2) return shape_error("unknown activation");
  try {
    auto* rows = static_cast<bf16*>(out->untyped_data());
    auto job = std::make_shared<ExpertMlpJob>(data(x), data(w_gate_up), data(w_down), group_sizes.typed_data(), rows,
                                              aligned(scratch->untyped_data()), s, static_cast<Activation>(activation));
    const int64_t real = job->num_real_rows();
    std::memset(rows + real * s.d, 0, (s.num_rows - real) * s.d * sizeof(bf16));
    run_job(pool, std::static_pointer_cast<Job>(job), max_threads);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error linear(ffi::ThreadPool pool, Bf16Buffer x, Bf16Buffer w, ffi::Result<ffi::Buffer<ffi::F32>> out,
                  ffi::Result<ffi::Buffer<ffi::U8>> scratch, int32_t max_threads) {
  const auto xd = x.dimensions(), wd = w.dimensions(), od = out->dimensions();
  if (xd.size() != 2 || wd.size() != 2 || od.size() != 2 || xd[1] != wd[1] || od[0] != xd[0] || od[1] != wd[0])
    return shape_error("linear takes x [B, K] and w [O, K] to [B, O]");
  if (!holds(scratch, max_panel_rows(xd[0]) * xd[1])) return shape_error("the scratch of linear is too small");
  try {
    const std::shared_ptr<Job> job = std::make_shared<LinearJob>(
        data(x), data(w), out->typed_data(), aligned(scratch->untyped_data()), xd[0], wd[0], xd[1]);
    run_job(pool, job, max_threads);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace moe_ladder

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_ladder_expert_mlp, moe_ladder::expert_mlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<int32_t>("activation")
                                  .Attr<int32_t>("max_threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(moe_ladder_linear, moe_ladder::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<int32_t>("max_threads"));
