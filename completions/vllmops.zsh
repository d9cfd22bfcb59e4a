#compdef vllmops

_vllmops_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _VLLMOPS_COMPLETE=complete_zsh vllmops)
}

compdef _vllmops_completion vllmops
