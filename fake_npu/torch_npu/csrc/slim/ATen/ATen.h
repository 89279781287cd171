// Stands in for torch's ATen/ATen.h, which the headers of c10d include and which declares every operator there is:
// reading it takes the compiler 7 of 14 seconds. These are all that those headers use.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
