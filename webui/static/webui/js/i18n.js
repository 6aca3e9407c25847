/* Translated texts. English texts are the message ids; for another language the page loads Django's catalog, a classic
   script that defines window.gettext. Depends on nothing else. */

export const gettext = (text) => window.gettext?.(text) ?? text;
export const ngettext = (one, many, count) => window.ngettext?.(one, many, count) ?? (count === 1 ? one : many);

/** Replaces each %(name)s by its value. */
export const format = (text, values) => text.replace(/%\((\w+)\)s/g, (match, name) => values[name] ?? match);
