# Warnings and sanitizers of everything that is added after this file is included.

add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall>)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wextra>)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wpedantic>)
if(PHASEKV_WARNINGS_AS_ERRORS)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(PHASEKV_SANITIZE)
    list(JOIN PHASEKV_SANITIZE "," sanitizers)
    add_compile_options(
        $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizers}>
        $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
        $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
    )
    add_link_options(-fsanitize=${sanitizers})
endif()
