// The embedding: rows of the token table, and GPT-2's positions.
#pragma once
#include "model/call.hpp"

namespace zg::model {

void embedding_forward(const Call& call);
void embedding_backward(const Call& call);

}  // namespace zg::model
