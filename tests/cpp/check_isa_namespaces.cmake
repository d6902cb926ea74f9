# Fails if an object of one instruction set defines a symbol that the linker could take for the same
# one of another (src/cpu/isa.h). Called with NM, NAMESPACE and OBJECTS (separated by "|").
string(REPLACE "|" ";" OBJECTS "${OBJECTS}")
execute_process(
    COMMAND ${NM} --demangle --defined-only ${OBJECTS}
    OUTPUT_VARIABLE symbols
    COMMAND_ERROR_IS_FATAL ANY
)
string(REPLACE ";" "," symbols "${symbols}")
string(REPLACE "\n" ";" lines "${symbols}")
set(shared "")
foreach(line IN LISTS lines)
    # Weak and unique definitions; DW.ref.* are references that exception handling needs.
    if(line MATCHES "^[0-9a-f]+ [WVu] " AND NOT line MATCHES " DW\\.ref\\.")
        if(NOT line MATCHES "phasekv::cpu::${NAMESPACE}::")
            string(APPEND shared "\n  ${line}")
        endif()
    endif()
endforeach()
if(shared)
    message(FATAL_ERROR "Not in phasekv::cpu::${NAMESPACE}:${shared}")
endif()
