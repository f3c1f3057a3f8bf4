// Chains of tokens drafted by a recorded head: pass after pass without a way back to Python.
#pragma once
#include "program.h"

namespace slipstream {

// The tokens a head finds likeliest, each fed to it with the feature it made of the one before.
//
//   program   its outputs are the features and the logits of picked rows
//   input     the first pass: every span's last row is picked, in order
//   lengths   tokens wanted behind each span, at least one; its table has room for all but the last
//   tokens    what the first columns of logits stand for; others are padding
//
// A chain ends early where the largest logit is not finite.
std::vector<std::vector<int64_t>> draft_chains(Program& program, Team& team, const Kernels& kernels, Input input,
                                               const std::vector<int64_t>& lengths, const int64_t* tokens,
                                               int64_t num_tokens);

}  // namespace slipstream
