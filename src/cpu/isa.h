// Every source in src/cpu is compiled once per instruction set, each time with other compiler flags
// and these two macros (see src/CMakeLists.txt):
//   PHASEKV_ISA_NAMESPACE  the namespace its code lives in
//   PHASEKV_ISA_LEVEL      one of the levels below
//
// What such a source defines or instantiates must live in PHASEKV_ISA_NAMESPACE. An inline function
// or a template from elsewhere (std::min, std::vector, ...) would be emitted under the same name by
// every instruction set, and the linker would keep any one of them: an AVX-512 one on a machine
// without AVX-512, say. The test `isa_objects_keep_to_their_namespace` looks for that.
#pragma once

#define PHASEKV_ISA_SCALAR 0
#define PHASEKV_ISA_AVX2 1
#define PHASEKV_ISA_AVX512 2
#define PHASEKV_ISA_AVX512_BF16 3

#if !defined(PHASEKV_ISA_NAMESPACE) || !defined(PHASEKV_ISA_LEVEL)
#error "compile the sources of src/cpu through src/CMakeLists.txt"
#endif
